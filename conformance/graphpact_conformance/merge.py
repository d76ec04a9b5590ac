"""The results of parts as the results of one run: `merged`.

Does not: run anything, or import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from graphpact_conformance.results import Claim, Finding, Outcome, PluginResults, Result

CALLS = "calls"
"""The check of the results about methods that no lane called."""
Values = Mapping[str, Sequence[str]]
"""The values of each dimension, as texts."""


def merged(parts: Sequence[PluginResults]) -> PluginResults:
    """Return the joined results of all parts, by lanes: the first of each part, then the second ones."""
    if len(parts) == 1:
        return parts[0]
    by_lane = [[list(group) for _, group in groupby(part.results, key=lambda r: r.lane)] for part in parts]
    results = [
        result for groups in zip_longest(*by_lane, fillvalue=[]) for group in groups for result in group
    ]
    kept: dict[str, Result] = {}  # keep one copy of equal results; times may differ
    for result in results:
        kept.setdefault(result.model_dump_json(exclude={"seconds"}), result)
    in_all = {*_uncalled(parts[0])}.intersection(*map(_uncalled, parts))
    results = [result for result in kept.values() if result.check != CALLS or result.lane in in_all]
    # A part that was stopped has none.
    claims = [_all_of(claims) for claims in zip(*(p.claims for p in parts if p.claims), strict=True)]
    if claims:
        results.append(of_claims(claims, results))
    drivers = dict.fromkeys(name for part in parts for name in part.drivers)
    return parts[0].model_copy(
        update={
            "results": results,
            "claims": claims,
            "hints": hints_of(claims) if claims else list(dict.fromkeys(h for p in parts for h in p.hints)),
            "not_shown": list(dict.fromkeys(text for part in parts for text in part.not_shown)),
            "drivers": list(drivers),
            "drawn": joined(part.drawn for part in parts),
            "traits": list(dict.fromkeys(trait for part in parts for trait in part.traits)),
        }
    )


def _uncalled(part: PluginResults) -> list[str]:
    """Return the methods that no lane of a part called."""
    return [result.lane for result in part.results if result.check == CALLS]


def _all_of(claims: Sequence[Claim]) -> Claim:
    """Return one claim from the claims of all parts."""
    shown = {claim.shown for claim in claims}
    hints = [claim.hint for claim in claims if claim.hint]
    state = next((s for s in ("fail", "pass") if s in shown), "not_run")
    return claims[0].model_copy(update={"shown": state, "hint": hints[0] if hints else None})


def hints_of(claims: Sequence[Claim]) -> list[str]:
    """Return the hints of claims; open hints fail under `--strict`."""
    return [f"{claim.capability}: {claim.hint}" for claim in claims if claim.hint]


def of_claims(claims: Sequence[Claim], results: Iterable[Result]) -> Result:
    """Return the result of a backend's claims: every declared capability must pass.

    A capability that fails because a rule does is a failure of the rule alone, which may be a known one.

    Args:
        claims: The claims.
        results: The results of all lanes.
    """
    wrong = [c for c in claims if c.is_made and c.shown == "fail"]
    if any(result.breaks_rule for result in results):
        wrong = []
    return Result(
        rule=None,
        check="claims",
        lane="capabilities",
        outcome=Outcome.FAIL if wrong else Outcome.PASS,
        findings=[
            Finding(
                rule=None,
                hook=None,
                field=claim.capability,
                expected=f"the declared capability ({claim.declared}) works",
                actual="a lane that needs it fails",
                help="fix it, or do not declare it",
            )
            for claim in wrong
        ],
    )


def joined(runs: Iterable[Values]) -> dict[str, list[str]]:
    """Join the values of several lanes or runs."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, values in run.items():
            found.setdefault(name, {}).update(dict.fromkeys(values))
    return {name: [*values] for name, values in found.items()}
