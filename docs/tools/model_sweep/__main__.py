"""Write ``docs/reference/models.md``, or print the rows of some cases.

Does not: succeed if an architecture is wrong or crashed.
"""

import itertools
import sys

from model_sweep.page import PAGE, render, row
from model_sweep.processes import run_cases
from model_sweep.small_models import CASES


def main(asked: list[str]) -> int:
    """Run the sweep; return the exit status."""
    unknown = set(asked) - set(CASES)
    if unknown:
        print(f"no such case: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    numbers = itertools.count(1)
    results = run_cases(
        asked or CASES,
        on_result=lambda result: print(f"{next(numbers):3} {row(result)}", end="", flush=True),
    )
    if not asked:
        PAGE.write_text(render(results), encoding="utf-8")
    return int(any(result.verdict in ("wrong", "crashed") for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
