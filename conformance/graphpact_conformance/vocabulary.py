"""The legend of reports: how batches are written, what names of lanes mean, and what experiments do.

Does not: import torch, except to describe experiments.
"""

import re
from collections.abc import Iterable

BATCHES = (
    "A batch is written in one line: the kind of step, the number of requests, each request, and the seed."
    ' "row 3: 16 cached keys and 1 new token with id 7, written to KV slot 40" is a request whose KV slots'
    " are in row 3 of req_to_token. 16 tokens of it are in the KV cache. This step adds one token, whose key"
    ' and value are written to slot 40. In "KV slots 40 then 44" a draft writes one slot in each of its'
    ' steps. "after new tokens none, 0" gives the parent of each token of a draft tree. "2 drafts accepted"'
    " counts the accepted tokens of a draft extend. Row 0 and the page of slot 0 are scratch."
)
"""How `graphpact_conformance.draws.problems.Problem.words` writes a batch."""

LANES = (
    "A lane is one backend and one runner in one configuration. Its name is KIND-pageN-HEADS-DTYPE, such as"
    " decode-page16-gqa-float32: the kind of step, the KV slots of a page, the layout of heads, and the dtype"
    " of queries, keys and values. More parts follow where the lane differs in something else."
)
"""What the name of a lane says."""

_KINDS = {
    "decode": "decode: one new token per request",
    "extend": "extend: prompts or chunks of prompts, each after a cached prefix or none",
    "mixed": "mixed: an extend in which some requests decode",
    "target_verify": "target verify: the target model reads the same number of drafts of every request",
    "draft_decode": "draft decode: the draft model decodes several steps in one graph",
    "draft_extend": "draft extend: the draft model reads the verified tokens of every request",
    "idle": "idle: a batch without requests, in a decode graph",
    "chain": "chain: a speculation algorithm drafts one branch for each request",
    "tree": "tree: a speculation algorithm drafts a tree for each request",
}
_FLAGS = {
    "tree": "drafts are a tree: top-k > 1",
    "frozen": "drafts on a KV cache that the model only reads",
    "segments": "attention is an eager call between the segments of a graph",
    "embeds": "batches carry input_embeds and mrope_positions",
    "wide": "more branches than draft steps, and other numbers of draft tokens than steps plus one",
    "deep": "drafts of 5 steps, and 10 tokens to verify",
    "single": "drafts of a single step",
    "broad": "drafts of 4 steps with up to 5 branches, and 65 tokens to verify",
}
_PARTS = {
    r"page(\d+)": r"\1 KV slots per page",
    "mha": "multi-head attention: as many key heads as query heads",
    "gqa": "grouped-query attention: several query heads share a key head",
    "mla": "multi-head latent attention: one cached latent for all heads",
    r"(float\d+|bfloat16)": r"queries, keys and values are \1",
    "counts": "layers read the number of live tokens, num_token_non_padded",
    "tall": "a tall ladder of capture sizes: 1, 2, 7, 16 and 37 requests; up to 12 in long contexts",
    "long": "a long context",
    "mixed": "a third layer with other heads, scale and window, and a fourth on the first one's KV cache",
    "fields": "batches carry the optional fields for which the runner declares slots",
    "high": "KV slots beyond 2^31 elements",
    r"steps(\d+)": r"drafts of \1 steps",
    r"topk(\d+)": r"drafts with \1 branches",
    r"tokens(\d+)": r"\1 tokens of each request are verified, with the newest one",
    r"ranks(\d+)": r"\1 ranks step together, each in a process of its own",
    "cuda": "the graphs are CUDA graphs instead of tapes",
    "inductor": "the graphs are of the driver inductor instead of the tape",
}
"""The meaning of each part of a name after the kind of step."""


def parts_of_lane(name: str) -> list[tuple[str, str]] | None:
    """Return the parts of the name of a lane, or of a kind of step, with their meanings.

    None if the name does not begin with a kind of step. The meaning of an unknown part is empty.
    """
    first, *others = name.lower().split("-")
    kind = max((k for k in _KINDS if first == k or first.startswith(f"{k}_")), key=len, default=None)
    if kind is None:
        return None
    flags = [flag for flag in first[len(kind) :].split("_") if flag]
    parts = [(kind, _KINDS[kind]), *((flag, _FLAGS.get(flag, "")) for flag in flags)]
    return parts + [(part, _meaning(part)) for part in others]


def _meaning(part: str) -> str:
    found = (match.expand(text) for regex, text in _PARTS.items() if (match := re.fullmatch(regex, part)))
    return next(found, "")


def experiments(names: Iterable[str] | None = None) -> dict[str, str]:
    """Return what experiments do, by name: the first line of each docstring; all of them by default."""
    from graphpact_conformance.experiments import EXPERIMENTS  # noqa: PLC0415  torch
    from graphpact_conformance.experiments.real_ranks import RealRanks  # noqa: PLC0415

    every = {e.name: e.about for e in EXPERIMENTS} | {RealRanks.name: RealRanks.about}
    return {name: about for name, about in every.items() if names is None or name in names}
