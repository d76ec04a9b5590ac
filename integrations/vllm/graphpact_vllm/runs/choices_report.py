"""`print_choices` and `judge_choices`: the choices of vLLM's dispatchers, as a table and as a verdict.

Does not: import vLLM, or ask a dispatcher; `graphpact_vllm.guard.dispatching` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from graphpact.errors import ContractError
from graphpact_cli.console import data, note, print_table

if TYPE_CHECKING:
    from graphpact_vllm.guard.dispatching import Table

_COLUMNS = ("dispatcher", "batch", "tokens", "graph", "")


def print_choices(tables: "Mapping[str, Table]") -> None:
    """Print a row for each range of tokens for which a dispatcher takes one graph."""
    print_table(data(), _COLUMNS, [(name, *row) for name, found in tables.items() for row in _ranges(found)])


def judge_choices(ranks: "Sequence[Mapping[str, Table]]") -> None:
    """Print how many choices there are.

    Raises:
        ContractError: A choice is wrong, or ranks differ.
    """
    from graphpact_vllm.guard.dispatching import DISPATCH_ADVICE, difference_of_ranks  # noqa: PLC0415  it imports torch

    found = [(name, row) for name, table in ranks[0].items() for row in table]
    wrong = [(name, row) for name, row in found if row["wrong"] is not None]
    note(f"{len(found):,} batches; {len(wrong)} of their graphs are wrong; {len(ranks)} ranks")
    if wrong:
        name, row = wrong[0]
        raise ContractError(
            f"{name} takes {row['graph']} for {row['batch']}: {row['wrong']}",
            hint=DISPATCH_ADVICE,
            rule="GP12",
        )
    if any(tables != ranks[0] for tables in ranks):
        fault = difference_of_ranks({f"rank {at}": tables for at, tables in enumerate(ranks)})
        raise ContractError(fault.text, hint=fault.advice, rule=fault.rule)


def _ranges(found: "Table") -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, tokens, graph and what is wrong, with neighbours of the same graph in one."""
    kinds: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in found:
        kinds.setdefault(_kind(row), {}).setdefault(row["tokens"], []).append(row)
    for kind, by_tokens in kinds.items():
        chosen = [
            (
                tokens,
                " or ".join(dict.fromkeys(row["graph"] for row in rows)),
                "; ".join(dict.fromkeys(row["wrong"] for row in rows if row["wrong"] is not None)),
            )
            for tokens, rows in by_tokens.items()
        ]
        for (graph, wrong), group in groupby(chosen, key=lambda each: each[1:]):
            tokens = [each[0] for each in group]
            span = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
            yield kind, span, graph, wrong


def _kind(row: Mapping[str, Any]) -> str:
    length = f"decode of {'' if row['is_uniform'] else 'up to '}{row['query_len']}"
    loras = f", {row['loras']} LoRAs" if row["loras"] else ""
    return f"{length if row['query_len'] else 'with a prefill'}{loras}"
