"""Write the reference pages that are made from the code: ``docs/configuration.md``.

Run it after a change of the configuration; a test holds the page to what this script would write.

Does not: build a site.
"""

import itertools
from pathlib import Path

from graphpact.config import config_keys

PAGE = Path(__file__).parent / "configuration.md"


def configuration() -> str:
    """Return the page of every configuration key."""
    lines = [
        "# Configuration",
        "",
        "Later sources win: defaults, the file of `--config`, the environment, options, `--set`.",
        "",
    ]
    for section, keys in itertools.groupby(config_keys(), lambda key: key.name.rpartition(".")[0]):
        lines += [
            f"## `[{section}]`",
            "",
            "| key | takes | default | meaning |",
            "|---|---|---|---|",
        ]
        for key in keys:
            name = key.name.rpartition(".")[2]
            default = "" if key.default is None else f"`{_toml(key.default)}`"
            lines.append(f"| `{name}` | {key.allowed} | {default} | {key.description} |")
        lines.append("")
    lines += [
        "## Environment",
        "",
        "A key's variable: `GRAPHPACT_`, then table and key in capitals, with two underscores between",
        "them: `GRAPHPACT_ENGINE__MAX_NUM_SEQS=16`.",
        "",
        "| variable | meaning |",
        "|---|---|",
        "| `GRAPHPACT_DISABLE_PLUGINS` | plugins to leave out: `name` or `kind:name`, commas between |",
        "| `GRAPHPACT_TRACE` | `1` prints every hook call of every lane |",
        "| `GRAPHPACT_TRACEBACK` | `1` prints the traceback of an error before its message |",
        "",
    ]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    PAGE.write_text(configuration(), encoding="utf-8")
