"""Tiers of plugins: what authors state beyond a run of the suite, and whether it holds.

    tier_rules   the tiers, and the rules of each
    statements   the file ``graphpact.toml`` in a plugin's package, which says of each rule where it stands
    proofs       what each rule asks for, and whether a plugin has it
    verdict      the tier of a plugin after a run, and a finding for each wrong statement

Does not: run the suite; the rules read the results of the run.
"""

from graphpact_conformance.tier_rules import TIER_RULES, TierRule
from graphpact_conformance.tiers.verdict import judge_tiers

__all__ = ["TIER_RULES", "TierRule", "judge_tiers"]
