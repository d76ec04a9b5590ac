"""`judge_tiers`: the tier of each plugin after a run, and a finding for each wrong statement.

Does not: judge pairs; a tier is that of one plugin.
"""

from collections.abc import Sequence
from pathlib import Path

from graphpact.errors import GraphpactError
from graphpact.plugins import PluginCatalog, PluginInfo
from graphpact_conformance.results import (
    Finding,
    Outcome,
    PluginResults,
    Result,
    TierRuleResult,
    TierVerdict,
)
from graphpact_conformance.targets import Options
from graphpact_conformance.tier_rules import TIER_RULES, TIERS, TierName
from graphpact_conformance.tiers.proofs import PROOFS, NotJudgedError, TierEvidence
from graphpact_conformance.tiers.statements import FILE, Statement, read_statements
from graphpact_conformance.xfails import Xfails, plugin_home


def judge_tiers(
    plugins: Sequence[PluginResults], catalog: PluginCatalog, known: Xfails, options: Options
) -> list[PluginResults]:
    """Return the results of a run with the tier of each plugin that states one.

    Args:
        plugins: The results of the run.
        catalog: The installed plugins.
        known: The known failures of the plugins.
        options: Options of the run. A narrowed run does not judge what a whole run shows.

    Raises:
        UsageError: A ``graphpact.toml`` cannot be read.
    """
    whole = not (options.only or options.lanes or options.scenario) and options.size != "quick"
    return [_judged(plugin, catalog, known, whole=whole) for plugin in plugins]


def _judged(plugin: PluginResults, catalog: PluginCatalog, known: Xfails, *, whole: bool) -> PluginResults:
    info = next((i for i in catalog.infos() if (i.kind, i.name) == (plugin.kind, plugin.name)), None)
    home = None if info is None or plugin.partner is not None else plugin_home(info.target)
    if info is None or home is None:
        return plugin
    statements = read_statements(home, plugin.kind, plugin.name)
    if statements is None:
        return plugin
    rules = [_result(each, plugin, info, home, known, whole=whole) for each in statements]
    # Where the run has failures, these two statements are wrong by them, and no findings of their own.
    echoes = ("conformant", "proven") if any(result.counts_against for result in plugin.results) else ()
    wrong = [
        Result(rule=None, check="tiers", lane=FILE, outcome=Outcome.FAIL, findings=[_finding(rule)])
        for rule in rules
        if rule.wrong is not None and rule.rule not in echoes
    ]
    verdict = TierVerdict(tier=tier_of(rules), rules=rules)
    return plugin.model_copy(update={"tier": verdict, "results": [*plugin.results, *wrong]})


def _result(
    statement: Statement, plugin: PluginResults, info: PluginInfo, home: Path, known: Xfails, *, whole: bool
) -> TierRuleResult:
    rule, wrong, unjudged = statement.rule, None, False
    if statement.status == "done":
        file = Path(statement.text) if statement.text is not None else None
        try:
            wrong = PROOFS[rule.name](TierEvidence(info, home, plugin, known, whole, file))
        except NotJudgedError:
            unjudged = True
        except GraphpactError as error:
            wrong = error.message
    return TierRuleResult(
        rule=rule.name,
        tier=rule.tier,
        status=statement.status,
        text=statement.text,
        wrong=wrong,
        unjudged=unjudged,
    )


def tier_of(rules: Sequence[TierRuleResult]) -> TierName | None:
    """Return the highest tier whose rules, and those below, hold; what a run could not judge counts."""
    reached: TierName | None = None
    for tier in TIERS:
        its_own = [rule.holds for rule in rules if rule.tier == tier]
        if not its_own or not all(its_own):
            break
        reached = tier
    return reached


def _finding(rule: TierRuleResult) -> Finding:
    return Finding(
        rule=None,
        hook=None,
        field=f"{FILE}: {rule.rule}",
        expected=TIER_RULES[rule.rule].sentence,
        actual=rule.wrong or "",
        help='fix it, or write "to do"',
    )
