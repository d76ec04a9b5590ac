"""The decorator of checks of which each verifies one rule: `rule_check_decorator`.

Does not: hold the text of a rule; see `graphpact_conformance.contract_rules`.
"""

from collections.abc import Callable, MutableMapping

from graphpact_conformance.contracts.requirement import Perform, Requirement, Subject
from graphpact_conformance.rules import EVERY_RULE


def rule_check_decorator(
    checks: MutableMapping[str, Requirement[Subject]],
) -> Callable[[str, str, str], Callable[[Perform[Subject]], Perform[Subject]]]:
    """Return a decorator that adds a function to ``checks`` as the requirement of a rule.

    The decorator takes the id of the rule, and ``at`` and ``fix`` of the `Requirement`. The requirement has
    the function's name, without a leading underscore, and the sentence of the rule.

    Args:
        checks: The requirements by name, in order.
    """

    def of_rule(rule: str, at: str, fix: str) -> Callable[[Perform[Subject]], Perform[Subject]]:
        def add(perform: Perform[Subject]) -> Perform[Subject]:
            name = perform.__name__.removeprefix("_")
            checks[name] = Requirement(name, EVERY_RULE[rule].requirement, rule, at, fix, perform)
            return perform

        return add

    return of_rule
