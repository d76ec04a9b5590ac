"""Exhibits and variants of graphs that attention leaves: eager calls, and metadata made in each step.

GP01 to GP03, GP05, GP08, GP10, GP15. In runners the bug is in the bridge, which both prefill runners call
between two segments. In backends it is in `init_metadata_eager`, which makes metadata for the live requests
and, where a backend declares ``eager_rows="padded"``, for the padding tokens of the shape.

Does not: plant bugs that eager steps have too.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest.mock import patch

import torch

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot, PaddingPolicy
from graphpact.step import Forward, Region, RegionContext, StepOutputs
from graphpact_museum.exhibit import Exhibit, Make, Variant
from graphpact_museum.runners import slotting


def _kept(owner: Any, name: str) -> dict[Any, Any]:
    """Return a dictionary that a plugin keeps as an attribute, empty at first."""
    kept: dict[Any, Any] = vars(owner).setdefault(name, {})
    return kept


# -- edits of a runner -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bridged:
    """One attention call of a region that is captured: what the segment before it hands over.

    Args:
        step: The step of the region.
        q: Queries, in their workspace.
        k: Keys, in theirs.
        v: Values, in theirs.
        layer: The layer.
        out: The workspace of the result.
    """

    step: RegionContext
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer: LayerSpec
    out: torch.Tensor

    def attend(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result of an eager call that attends, in ``out`` if given."""
        given = self.q, self.k, self.v, self.layer, out
        return self.step.driver.eager_call(self.step.attend, *given)


Crossing: TypeAlias = Callable[[Any, Bridged], torch.Tensor]
"""``(runner, call) -> out``: attends between two segments."""


def crossing(cross: Crossing) -> Make:
    """Return a factory of runners that cross from segment to segment in another way, in captures."""

    def make(base: type[Any]) -> type[Any]:
        module = sys.modules[next(c.__module__ for c in base.__mro__ if "compose" in vars(c))]

        class Crosses(base):  # type: ignore[misc]
            """A runner with another bridge."""

            def compose(self, forward: Forward, step: RegionContext) -> Region:
                """Return the region with the other bridge."""
                runner = self

                class Other(module.Bridge):  # type: ignore[misc, name-defined]
                    """A bridge with another call."""

                    def __call__(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                        """Put everything in place, and cross."""
                        if self.step.is_eager:
                            return super().__call__(q, k, v, layer, metadata)
                        q = self._put("q", q, layer)
                        k, v = (
                            None if t is None else self._put(n, t, layer) for n, t in (("k", k), ("v", v))
                        )
                        out = self._place("out", layer)
                        return cross(runner, Bridged(self.step, q, k, v, layer, out))

                with patch.object(module, "Bridge", Other):
                    right: Region = super().compose(forward, step)

                def region() -> StepOutputs:
                    with patch.object(module, "Bridge", Other):
                        return right()

                return region

        return Crosses

    return make


# -- GP01: what the next segment reads ---------------------------------------------------------------


def _by_a_list(_: Any, call: Bridged) -> torch.Tensor:
    """Hand the result on in a list, which the eager call fills."""
    held: list[torch.Tensor] = []

    def attend() -> None:
        held[:] = [call.step.attend(call.q, call.k, call.v, call.layer)]

    call.step.driver.eager_call(attend)
    return held[0].clone()


def _by_every_result(_: Any, call: Bridged) -> torch.Tensor:
    """Hand the result on in a list that keeps those of all steps, and read it where it is."""
    held: list[torch.Tensor] = []

    def attend() -> None:
        held.append(call.step.attend(call.q, call.k, call.v, call.layer))

    call.step.driver.eager_call(attend)
    return held[-1]


# -- GP08: the count of rows -------------------------------------------------------------------------


def _cut(call: Bridged, count: Callable[[], int]) -> torch.Tensor:
    """Attend for as many tokens as ``count`` says in each step."""
    step = call.step

    def attend(out: torch.Tensor) -> torch.Tensor:
        live = count()
        q, k, v = (None if t is None else t[:live] for t in (call.q, call.k, call.v))
        assert q is not None  # noqa: S101  there are always queries
        result = step.backend.forward(q, k, v, call.layer, step.metadata)
        out[: len(result)].copy_(result)
        out[len(result) :].zero_()
        return out

    return step.driver.eager_call(attend, call.out).clone()


def _cuts_as_captured(_: Any, call: Bridged) -> torch.Tensor:
    live = call.step.attended.num_tokens
    return _cut(call, lambda: live)


def _cuts_as_before(base: type[Any]) -> type[Any]:
    def cross(runner: Any, call: Bridged) -> torch.Tensor:
        return _cut(call, lambda: runner.live[call.step.shape])

    class CutsAsBefore(crossing(cross)(base)):  # type: ignore[misc]
        """A runner that notes the count of a step too late, so that eager calls take that of the last one."""

        def populate(self, registry: Any, batch: ForwardBatch, shape: Any) -> None:
            """Note the count for the next step of the shape."""
            noted = _kept(self, "noted")
            _kept(self, "live")[shape] = noted.get(shape, batch.num_tokens)
            noted[shape] = batch.num_tokens
            super().populate(registry=registry, batch=batch, shape=shape)

    return CutsAsBefore


def _cuts_for_every_backend(_: Any, call: Bridged) -> torch.Tensor:
    return _cut(call, lambda: call.step.live.num_tokens)


# -- GP15: where a result lies -----------------------------------------------------------------------


def _stays_in_the_workspace(_: Any, call: Bridged) -> torch.Tensor:
    return call.attend(call.out)


def _one_output_for_all_layers(runner: Any, call: Bridged) -> torch.Tensor:
    """Give the calls of all layers one output, which is the runner's own memory."""
    outputs = _kept(runner, "outputs")
    out = outputs.setdefault(call.step.shape, torch.zeros_like(call.out))
    return call.attend(out)


# -- GP02, GP03: fields of images --------------------------------------------------------------------


def _keeps_embeddings(_: Any, slots: list[GraphSlot]) -> list[GraphSlot]:
    kept: dict[str, Any] = {"padding_policy": PaddingPolicy.KEEP_PAD, "reason": "padding is cut off"}
    return [replace(slot, **kept) if slot.name == "input_embeds" else slot for slot in slots]


def _positions_of_text(base: type[Any]) -> type[Any]:
    class PositionsOfText(base):  # type: ignore[misc]
        """A runner that fills multimodal positions at capture alone."""

        def populate(self, registry: Any, batch: ForwardBatch, shape: Any) -> None:
            """Fill all other slots."""
            slot = registry.get_slot("mrope_positions").slice_for(shape.batch_size, shape.num_tokens)
            kept = slot.clone()
            super().populate(registry=registry, batch=batch, shape=shape)
            if shape in _kept(self, "filled"):
                slot.copy_(kept)
            _kept(self, "filled")[shape] = True

    return PositionsOfText


_RUNNERS = ("breakable_cuda_graph", "piecewise_cuda_graph")


def _in_runners(
    bases: tuple[str, ...], what: str, rule: str, thread: str, planted: str, make: Make, lane: str = "extend"
) -> list[Exhibit]:
    """Return an exhibit for each runner."""
    return [
        Exhibit(
            name=f"{base.partition('_')[0]}-{what}",
            rule=rule,
            thread=thread,
            planted=planted,
            base=base,
            lanes=(lane,),
            make=make,
            site="runner",
        )
        for base in bases
    ]


_CROSSINGS = [
    *_in_runners(
        _RUNNERS,
        "hands-results-on-in-a-list",
        "GP01",
        "vllm-project/vllm#37361",
        "An eager call puts its result, a new tensor in every step, into a list; the next segment reads that"
        " of the capture.",
        crossing(_by_a_list),
    ),
    *_in_runners(
        _RUNNERS[:1],
        "keeps-the-results-of-all-steps",
        "GP01",
        "vllm-project/vllm#40038",
        "An eager call adds its result to a list that keeps all of them; the next segment reads the first.",
        crossing(_by_every_result),
    ),
    *_in_runners(
        _RUNNERS,
        "cuts-rows-as-captured",
        "GP08",
        "sgl-project/sglang#21452",
        "Eager calls cut padding tokens off by the count of live tokens at capture.",
        crossing(_cuts_as_captured),
    ),
    *_in_runners(
        _RUNNERS[:1],
        "cuts-rows-as-in-the-step-before",
        "GP02",
        "sgl-project/sglang#21452",
        "Eager calls cut padding tokens off by the count of live tokens of the step before.",
        _cuts_as_before,
    ),
    *_in_runners(
        _RUNNERS[:1],
        "cuts-rows-for-every-backend",
        "GP05",
        "vllm-project/vllm#25265",
        "Eager calls cut padding tokens off, also for a backend whose metadata counts them.",
        crossing(_cuts_for_every_backend),
        "mixed",
    ),
    *_in_runners(
        _RUNNERS,
        "leaves-results-in-the-workspace",
        "GP15",
        "sgl-project/sglang#22218",
        "The result of attention stays in the workspace of all layers, where the next layer's overwrites it.",
        crossing(_stays_in_the_workspace),
    ),
    *_in_runners(
        _RUNNERS[:1],
        "has-one-output-for-all-layers",
        "GP15",
        "sgl-project/sglang#22218",
        "Eager calls of all layers write one output, which no segment copies.",
        crossing(_one_output_for_all_layers),
    ),
    *_in_runners(
        _RUNNERS,
        "keeps-embeddings",
        "GP03",
        "sgl-project/sglang#18647",
        "Padding tokens keep the embeddings of an earlier, larger batch.",
        slotting(_keeps_embeddings),
        "extend_embeds",
    ),
    *_in_runners(
        _RUNNERS[:1],
        "misses-multimodal-positions",
        "GP02",
        "sgl-project/sglang#39088",
        "Multimodal positions are copied at capture only.",
        _positions_of_text,
        "extend_embeds",
    ),
]


# -- backends: metadata of eager calls ---------------------------------------------------------------


def _no_fake_request(base: type[Any]) -> type[Any]:
    class NoFakeRequest(base):  # type: ignore[misc]
        """A backend whose metadata of eager calls leaves padding tokens to no request."""

        is_eager = False

        def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
            """Make metadata that ends at the live tokens."""
            self.is_eager = True
            try:
                return super().init_metadata_eager(batch, **more)
            finally:
                self.is_eager = False

        def _fill_ragged_queries(self, view: ForwardBatch, metadata: Any) -> torch.Tensor:
            """Return no query of the fake request."""
            num_q: torch.Tensor = super()._fill_ragged_queries(view, metadata)
            if not self.is_eager:
                return num_q
            metadata.qo_indptr[-1:].copy_(metadata.qo_indptr[-2:-1])
            return torch.cat([num_q[:-1], torch.zeros_like(num_q[-1:])])

    return NoFakeRequest


@dataclass(frozen=True, slots=True)
class RawMetadata:
    """The metadata of the live requests of a batch, which kernels cannot read yet.

    Args:
        batch: The batch.
    """

    batch: ForwardBatch


def _upgrades_at_capture(base: type[Any]) -> type[Any]:
    class UpgradesAtCapture(base):  # type: ignore[misc]
        """A backend that upgrades raw metadata where it meets a token count for the first time."""

        capabilities = replace(base.capabilities, eager_rows="padded")

        def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
            """Return raw metadata, upgraded the first time."""
            known = _kept(self, "upgraded")
            if batch.num_tokens in known:
                return RawMetadata(batch)
            known[batch.num_tokens] = True
            return super().init_metadata_eager(batch, **more)

    return UpgradesAtCapture


def _pads_as_captured(base: type[Any]) -> type[Any]:
    class PadsAsCaptured(base):  # type: ignore[misc]
        """A backend that counts padding tokens once for each token count: at capture, which has none."""

        capabilities = replace(base.capabilities, eager_rows="padded")

        def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
            """Upgrade metadata of the live tokens to the padded count, as known."""
            known = _kept(self, "padding")
            live = int(batch.required_extend_lens()[1].sum())
            end = live + known.setdefault(batch.num_tokens, batch.num_tokens - live)
            cut = replace(
                batch,
                input_ids=batch.input_ids[:end],
                positions=batch.positions[:end],
                out_cache_loc=batch.out_cache_loc[:end],
            )
            return super().init_metadata_eager(cut, **more)

    return PadsAsCaptured


def _upgrades_once(base: type[Any]) -> type[Any]:
    class UpgradesOnce(base):  # type: ignore[misc]
        """A backend whose kernels upgrade raw metadata on first use, and keep the result."""

        capabilities = replace(base.capabilities, eager_rows="padded")

        def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
            """Return raw metadata."""
            return super().init_metadata_eager(batch, **more) if more else RawMetadata(batch)

        def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
            """Attend with upgraded metadata."""
            if isinstance(metadata, RawMetadata):
                known = _kept(self, "upgraded")
                if len(q) not in known:
                    known[len(q)] = super().init_metadata_eager(metadata.batch)
                metadata = known[len(q)]
            return super().forward(q, k, v, layer, metadata)

    return UpgradesOnce


_IN_BACKENDS = [
    Exhibit(
        name="flashinfer-eager-calls-without-the-fake-request",
        rule="GP05",
        thread="ROCm/ATOM#1595",
        planted="Metadata of eager calls leaves padding tokens to no request; that of graphs does not.",
        base="flashinfer",
        lanes=("extend_segments",),
        make=_no_fake_request,
    ),
    Exhibit(
        name="reference-upgrades-metadata-at-capture",
        rule="GP10",
        thread="sgl-project/sglang#26742",
        planted="Raw metadata is upgraded at capture only, so that replays have raw metadata.",
        base="reference",
        lanes=("extend_segments",),
        make=_upgrades_at_capture,
    ),
    Exhibit(
        name="reference-pads-metadata-as-captured",
        rule="GP08",
        thread="sgl-project/sglang#26742",
        planted="Raw metadata is upgraded by the number of padding tokens at capture, which is 0.",
        base="reference",
        lanes=("extend_segments",),
        make=_pads_as_captured,
    ),
    Exhibit(
        name="reference-upgrades-metadata-once",
        rule="GP08",
        thread="sgl-project/sglang#26742",
        planted="Metadata is upgraded by the first attention call and kept, so that replays use that of the"
        " capture.",
        base="reference",
        lanes=("extend_segments",),
        make=_upgrades_once,
    ),
]

EXHIBITS = [*_CROSSINGS, *_IN_BACKENDS]
"""All exhibits of the room."""


# -- right runners and backends ----------------------------------------------------------------------


def _mlp(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x) / 2


def _breaks_at_an_mlp(_: Any, call: Bridged) -> torch.Tensor:
    """Attend, and run an MLP as another eager call, which writes its input."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(_mlp(x))

    return call.step.driver.eager_call(run, call.attend(call.out)).clone()


def _with_an_mlp(base: type[Any]) -> type[Any]:
    class WithAnMlp(crossing(_breaks_at_an_mlp)(base)):  # type: ignore[misc]
        """A runner whose graphs break at an MLP too; eager steps run it like any other work."""

        def compose(self, forward: Forward, step: RegionContext) -> Region:
            """Return the region; in an eager step the MLP is a call of the model's."""
            if not step.is_eager:
                return super().compose(forward, step)  # type: ignore[no-any-return]

            def eagerly(batch: ForwardBatch, metadata: Any, attend: Any) -> StepOutputs:
                return forward(batch, metadata, lambda *given: _mlp(attend(*given)))

            return super().compose(eagerly, step)  # type: ignore[no-any-return]

    return WithAnMlp


def _one_output_for_each_layer(runner: Any, call: Bridged) -> torch.Tensor:
    """Give the call of each layer an output of its own, made before the capture."""
    outputs = _kept(runner, "outputs")
    at = call.step.shape, call.layer.layer_id
    return call.attend(outputs.setdefault(at, torch.zeros_like(call.out)))


def _returns_new_results(_: Any, call: Bridged) -> torch.Tensor:
    return call.attend()


@dataclass(frozen=True, slots=True)
class FullMetadata:
    """Upgraded metadata: what the kernels of a backend read.

    Args:
        of_kernels: The metadata of the backend.
        num_tokens: Tokens of the batch, with padding tokens where the backend takes them.
        num_padding: Padding tokens among them.
    """

    of_kernels: Any
    num_tokens: int
    num_padding: int


def _upgrades_in_every_step(rows: Any) -> Make:
    """Return a factory of backends that upgrade raw metadata in every step, on live or padded rows."""

    def make(base: type[Any]) -> type[Any]:
        class Upgrades(base):  # type: ignore[misc]
            """A backend with metadata of its own in eager steps."""

            capabilities = replace(base.capabilities, eager_rows=rows)

            def init_metadata_eager(self, batch: ForwardBatch, **more: Any) -> Any:
                """Make raw metadata, and upgrade it."""
                return self._upgraded(RawMetadata(batch), **more)

            def _upgraded(self, raw: RawMetadata, **more: Any) -> FullMetadata:
                live = sum(raw.batch.required_extend_lens()[1].tolist()) if raw.batch.batch_size else 0
                full = super().init_metadata_eager(raw.batch, **more)
                return FullMetadata(full, raw.batch.num_tokens, raw.batch.num_tokens - live)

            def forward(self, q: Any, k: Any, v: Any, layer: Any, metadata: Any) -> Any:
                """Attend; queries have to be as many as the metadata counts."""
                if isinstance(metadata, FullMetadata):
                    if len(q) != metadata.num_tokens:
                        raise ValueError(f"{len(q)} queries, and metadata for {metadata.num_tokens}")
                    metadata = metadata.of_kernels
                return super().forward(q, k, v, layer, metadata)

        return Upgrades

    return make


VARIANTS = [
    *(
        Variant(name=f"{base.partition('_')[0]}-{what}", style=style, base=base, lanes=(lane,), make=make)
        for what, style, lane, make in (
            (
                "with-an-mlp-between-segments",
                "Graphs break at an MLP too, an eager call that writes its input.",
                "extend",
                _with_an_mlp,
            ),
            (
                "with-an-output-for-each-layer",
                "Each layer has an output of its own, and no segment copies it.",
                "mixed",
                crossing(_one_output_for_each_layer),
            ),
            (
                "with-new-results",
                "Eager calls return new tensors, which the driver copies in place.",
                "extend_embeds",
                crossing(_returns_new_results),
            ),
        )
        for base in _RUNNERS
    ),
    Variant(
        name="upgraded-metadata-of-padded-tokens",
        style="Raw metadata is upgraded in every step, with a request for the padding tokens.",
        base="reference",
        lanes=("extend_segments",),
        make=_upgrades_in_every_step("padded"),
    ),
    Variant(
        name="upgraded-metadata-of-live-tokens",
        style="Raw metadata is upgraded in every step, for the live tokens alone.",
        base="reference",
        lanes=("extend_segments",),
        make=_upgrades_in_every_step("live"),
    ),
]
"""Right plugins of this room."""
