"""SGLang's backends as the suite's adapter takes them: `peers.sglang_checks:NAME`, a factory with its reader.

    PYTHONPATH=tests graphpact check --adapter sglang peers.sglang_checks:fa3

A process has one configuration of SGLang, that of the backend made last: the job runs each in its own.

Does not: check lanes with many capture sizes or long contexts, because Triton's interpreter is too slow for
their metadata kernels; or run anything, see `peers.__main__`.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from graphpact_adapters import stand_ins
from graphpact_adapters.sglang import Backends
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.targets import Options
from peers import sglang_adapted
from peers.job import Known, Row
from peers.wheels import TRITON, Wheel, unpack

SGLANG = Wheel("sglang", "0.5.23", tuple(f"sglang/kernels/jit/{name}/*" for name in ("csrc", "include")))
MSGSPEC = Wheel("msgspec", "0.22.0", ("msgspec/*.so",))
"""Backends keep metadata in its structs, so it cannot be a stand-in."""


@dataclass(frozen=True)
class Released(Backends):
    """A backend of the wheel."""

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the lanes of a run."""
        for plan in super().lanes(options):
            if not (plan.lane.config.is_tall or plan.lane.config.is_long):
                yield plan


@functools.cache
def _prepare() -> None:
    sys.path += [str(unpack(TRITON)), str(unpack(MSGSPEC))]
    sglang_adapted.install(unpack(SGLANG))
    stand_ins.called()  # from here on


def __getattr__(name: str) -> Any:
    """Return the adapter of a backend in the table."""
    if name not in sglang_adapted.ADAPTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _prepare()
    adapted = sglang_adapted.ADAPTED[name]
    return Released(**{field.name: getattr(adapted, field.name) for field in fields(adapted)})


NOT_RUN: dict[str, str] = {
    "triton_draft": "its kernel writes behind the last row of `cuda_graph_kv_indices`, whose rows have"
    " `model_config.context_len` slots, if drafts go beyond that (compare `fa3_draft`): Triton's interpreter"
    " then writes into the heap of the process",
}
_CONTEXT = (
    "Real, and public (#29695, #34239, #35985): the buffers of graphs are sized by"
    " `model_config.context_len`. A request may have all but one token of it and draft or verify more, and"
    " `req_to_token` has columns for these. "
)
_DRAFT = (
    "Real, by the engine's code: no graph is involved. The metadata of each draft step has the length of the"
    " committed sequence, so a step does not see the tokens that the steps before it have drafted. Outputs of"
    " the engine stay right, since the target verifies; fewer drafts are accepted. "
)
TOO_NARROW = _CONTEXT + "`page_table` has a page less than the last keys need."
_EAGER_TOO = TOO_NARROW + " The table of an eager step has the same width, so no graph is involved."
_TRTLLM_MHA = (Known(None, "", _EAGER_TOO), Known(None, "an eager build", _EAGER_TOO))
_GUARDED = (
    _CONTEXT + "The engine's own guard raises where a full batch of such requests drafts: the step is not"
    " run, and no memory is overwritten."
)
_GUARD = "attention/utils.py"
_MLA_DRAFT = (
    Known(None, "an eager run", _DRAFT + "#24750 was the same fault in another class."),
    Known(None, "an eager build", _DRAFT + "A replay shows the same."),
)
KNOWN: dict[str, tuple[Known, ...]] = {
    "fa3": (Known("GP13", "page_table", TOO_NARROW),),
    "fa3_draft": (Known("GP13", "draft step 2: page_table", TOO_NARROW),),
    "trtllm_mha": _TRTLLM_MHA,
    "trtllm_mha_draft": _TRTLLM_MHA,
    "flashinfer_draft": (Known(None, _GUARD, _GUARDED),),
    "flashinfer_mla": (
        Known(
            None,
            "attention/flashinfer_mla_backend.py",
            _CONTEXT + "`cuda_graph_kv_indices` has `max_bs * context_len` slots, and a full batch that"
            " verifies has more: the copy of `fast_mla_prefill_plan` raises, and the step is not run.",
        ),
    ),
    "flashinfer_mla_draft": (
        Known(None, _GUARD, _GUARDED),
        Known(
            None,
            "an eager run",
            _DRAFT + "Here the list of slots is right, and the plan gets the committed length beside it.",
        ),
        Known(None, "an eager build", _DRAFT + "A replay shows the same."),
    ),
    "trtllm_mla_draft": _MLA_DRAFT,
    "cutedsl_mla_draft": _MLA_DRAFT,
    "flashmla_draft": _MLA_DRAFT,
    "dsa_draft": _MLA_DRAFT,
    "deepseek_v4": (
        Known(
            "GP04",
            "swa_topk_lengths",
            "Real, and public (#31270): the lengths of a draft extend are the request's length less the"
            " later tokens of its chunk. A padding row has one key and four tokens, so two of its lengths are"
            " negative, and nothing bounds them.",
        ),
    ),
}
"""The known findings."""


def rows() -> Iterator[Row]:
    """Yield the rows of the job: one for each backend of the table; download missing wheels.

    Raises:
        RuntimeError: A wheel is not available.
    """
    for wheel in (SGLANG, TRITON, MSGSPEC):  # before two workers download the same one
        unpack(wheel)
    for name in sglang_adapted.ADAPTED:
        yield Row(
            f"SGLang {SGLANG.version}",
            name,
            f"adapter:sglang:{__name__}:{name}",
            NOT_RUN.get(name, ""),
            KNOWN.get(name, ()),
        )
