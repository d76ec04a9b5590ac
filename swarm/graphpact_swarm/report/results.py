"""`Results`: one line of JSON for each run, in a file that a later run continues.

Does not: run anything.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from graphpact.errors import UsageError
from graphpact.files import read_file, write_file
from graphpact.output_file import OutputFile
from graphpact_swarm.draws.configurations import value_name
from graphpact_swarm.records import record_of
from graphpact_swarm.scenario import Scenario
from graphpact_swarm.verdicts.coverage import Coverage
from graphpact_swarm.verdicts.judging import RunFinding, Verdict

FORMAT = 1
FILE = "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What came of one seed.

    Args:
        seed: The seed.
        choice: Its configuration and load.
        verdict: What was said about its run.
        scenario: The scenario; None for a clean run, which the seed says.
        start_seconds: How long the start of the engine took; 0 if another seed started it.
    """

    seed: int
    choice: Mapping[str, Any]
    verdict: Verdict
    scenario: Scenario | None = None
    start_seconds: float = 0.0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SeedResult":
        """Return what a worker answered, or a line of the file.

        Raises:
            KeyError, TypeError, UsageError: It is something else.
        """
        given = values["scenario"]
        return cls(
            seed=int(values["seed"]),
            choice=dict(given["choice"]),
            verdict=Verdict.from_json(values["verdict"]),
            scenario=Scenario.from_json(given) if "arrivals" in given else None,
            start_seconds=float(values["start_seconds"]),
        )


@dataclass
class Results:
    """The results of a swarm.

    Args:
        head: What was run: engine, release, settings.
        folder: Where they are.
        file: Their file.
        results: Those of each seed.
        smaller: The shrunk scenario of a signature, as its file, and the finding there.
        skipped: Seeds that were not run, because they add no new pair of features.
    """

    head: Mapping[str, Any]
    folder: Path
    file: OutputFile
    results: dict[int, SeedResult] = field(default_factory=dict)
    smaller: dict[tuple[str, str, str], tuple[Path, RunFinding]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    @property
    def coverage(self) -> Coverage:
        """What all runs went through."""
        found = Coverage()
        for each in self.results.values():
            found.add(each.choice, each.verdict.coverage)
        return found

    def found(self) -> dict[tuple[str, str, str], list[SeedResult]]:
        """Return the runs with new findings by the signature of the first one."""
        found: dict[tuple[str, str, str], list[SeedResult]] = {}
        for each in self._in_order():
            if each.verdict.name == "finding" and (first := each.verdict.first) is not None:
                found.setdefault(first.signature, []).append(each)
        return found

    def known(self) -> dict[str, list[SeedResult]]:
        """Return the runs with known findings by what is known about them."""
        known: dict[str, list[SeedResult]] = {}
        for each in self._in_order():
            for reason in dict.fromkeys(finding.known for finding in each.verdict.findings if finding.known):
                known.setdefault(reason, []).append(each)
        return known

    def _in_order(self) -> list[SeedResult]:
        return sorted(self.results.values(), key=lambda each: each.seed)

    def count(self, verdict: str) -> int:
        """Return the number of runs with a verdict; see `Verdict.name`."""
        return sum(each.verdict.name == verdict for each in self.results.values())

    def by_feature(self) -> Iterator[tuple[str, Counter[str]]]:
        """Yield each value of each feature, and how many of its runs had which verdict."""
        counts: dict[str, Counter[str]] = {}
        for each in self.results.values():
            for name, value in each.choice.items():
                counts.setdefault(value_name(name, value), Counter())[each.verdict.name] += 1
        yield from sorted(counts.items())

    # -- the file --------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path, head: Mapping[str, Any]) -> "Results":
        """Return the results in a folder, or empty ones, whose head is then written. `close` them.

        Raises:
            UsageError: The file there is of another run, damaged, or written by another process.
        """
        path = folder / FILE
        file = OutputFile(path, "file of results", existing="continued", is_locked=True)
        results = cls(head=json.loads(json.dumps({"format": FORMAT, **head})), folder=folder, file=file)
        is_new = not path.exists()
        if is_new:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                hint = "name another folder with --out"
                raise UsageError(f"{folder} cannot be made: {error.strerror or error}", hint=hint) from error
        else:
            results._read_all(path)
        file.open()
        if is_new:
            results._write(results.head)
        return results

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def add(self, values: Mapping[str, Any]) -> SeedResult:
        """Add what a worker answered about a seed, in the file too."""
        result = SeedResult.from_json(values)
        self.results[result.seed] = result
        self._write({"result": values})
        return result

    def add_smaller(self, of: RunFinding, path: Path, finding: RunFinding) -> None:
        """Add the shrunk scenario of a finding, in the file too."""
        self.smaller[of.signature] = path, finding
        self._write({"smaller": {"of": list(of.signature), "file": path.name, "finding": asdict(finding)}})

    def _read_all(self, path: Path) -> None:
        """Read what is there; the last line may be cut, by a run that was killed, and is dropped."""
        hint = f"name another folder with --out, or remove {self.folder}"
        try:
            lines = read_file(path).decode().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            there = dict(json.loads(whole[0]))
            for line in whole[1:]:
                self._read(json.loads(line))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            UsageError,
        ) as error:
            raise UsageError(f"{path} has no results: {type(error).__name__}: {error}", hint=hint) from error
        if there != self.head:
            differs = [name for name in self.head if there.get(name) != self.head[name]]
            raise UsageError(f"{path} is of a run with another {', '.join(differs)}", hint=hint)
        if len(whole) < len(lines):
            write_file(path, "".join(whole))

    def _read(self, line: Mapping[str, Any]) -> None:
        if "result" in line:
            result = SeedResult.from_json(line["result"])
            self.results[result.seed] = result
        else:
            values = line["smaller"]
            kind, rule, of_field = values["of"]
            self.smaller[kind, rule, of_field] = (
                self.folder / Path(values["file"]).name,
                record_of(RunFinding, values["finding"]),
            )

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n", at_once=True)
