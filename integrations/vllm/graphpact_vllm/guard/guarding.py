"""`VllmGuard`: the guard in vLLM, around the captures and replays of both model runners.

A graph is named by what captured it and by its shape; see `graphpact_vllm.seams.graphs`. What a capture reads
of a builder's metadata is promised, and what the builder makes for a replay is held to it.

Does not: see graphs that other code captures by ``torch.cuda.CUDAGraph``, such as those of encoders.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from graphpact_guard import GraphKey, Guard, RankAgreement, Settings, log_at_exit
from graphpact_vllm import installed_release
from graphpact_vllm.guard.contents import expected_of, has_exact_lengths
from graphpact_vllm.guard.dispatching import Choice
from graphpact_vllm.guard.start import run_start
from graphpact_vllm.seams.builders import Builders, Built
from graphpact_vllm.seams.graphs import (
    BREAKABLE,
    CAPTURE,
    CONTEXT,
    MODEL_CAPTURE,
    MODEL_REPLAY,
    REPLAY,
    SEGMENTS,
    WRAPPER,
    call_of,
    key_of,
)
from graphpact_vllm.seams.hooking import wrap
from graphpact_vllm.seams.ranks import agreement_of_ranks, rank_name, rank_of_all
from graphpact_vllm.seams.steps import StepCounts

METADATA = ("metadata",)
"""The attribute of `Held` that holds the metadata of a step."""
_LIMITS = ("max_seq_len", "max_query_len", "max_seqlen_k", "max_seqlen_q", "num_actual_tokens")
"""Numbers of metadata that only bound a kernel: vLLM captures with the largest ones."""
_INPUTS = "model inputs"
_SLOTS = "slot mapping"
_UNSEEN = "graphs that other code captures by torch.cuda.CUDAGraph, and memory that kernels reach by pointers"


@dataclass
class Held:
    """What a builder made, in the form of an owner with metadata.

    Args:
        metadata: It.
    """

    metadata: Any


class VllmGuard:
    """The hooks of the guard. The guard itself is made at the first capture of the process.

    Args:
        settings: What is asked for.
        builders: What the builders make.
        counts: The counts of steps, which leave out eager runs of the guard.

    Attributes:
        guard: The guard; None before the first capture.
    """

    def __init__(self, settings: Settings, builders: Builders, counts: StepCounts) -> None:
        self.guard: Guard | None = None
        self._settings, self._builders, self._counts = settings, builders, counts
        self._buffers: Any = None  # the static inputs of the graphs that are captured now
        self._model: Any = None
        self._readers: dict[int, Any] = {}  # what layers read during a capture, by id of the metadata
        self._given: set[int] = set()  # the metadata that layers were given during a capture, by id
        self._builders_of: dict[GraphKey, set[str]] = {}  # the builders of the layers of a graph, by name
        self._is_exact = False  # whether contents can be checked
        # Keeps refused graphs equal on all ranks; None if none is refused.
        self._agreement: RankAgreement | None = None
        self._model_inputs: dict[GraphKey, tuple[dict[str, Any], Any]] = {}  # and the forward context

    def register(self) -> None:
        """Wrap the captures and replays of vLLM."""
        for target, hook in (
            (CAPTURE, self._capture),
            (REPLAY, self._replay),
            (MODEL_CAPTURE, self._model_capture),
            (MODEL_REPLAY, self._model_replay),
            (WRAPPER, self._call),
            (BREAKABLE, self._call),
            (f"{SEGMENTS}.add_eager", self._eager_call),
            (CONTEXT, self._context),
        ):
            wrap(target, hook)

    def start(self, runner: Any, found: Sequence[Choice]) -> None:
        """Verify synthetic steps of each captured shape; all ranks refuse what one refuses.

        Args:
            runner: The model runner.
            found: What its dispatcher takes for each batch.
        """
        assert self.guard is not None  # noqa: S101  it captured
        with self._counts.paused(), self.guard.starting() as synthetic:
            synthetic.shapes = run_start(runner, found, self._settings.start)
            if self._agreement is not None:
                self.guard.refused = self._agreement.update(self.guard.refused)

    # -- model runner V2 -------------------------------------------------------------------------

    def _capture(
        self, original: Callable[..., Any], manager: Any, create: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._guard_of(manager.vllm_config)

        def create_forward_fn(desc: Any, warmup: bool) -> Callable[[Any], None]:  # noqa: FBT001  vLLM's own
            forward: Callable[[Any], None] = create(desc, warmup=warmup)
            if warmup or desc.cg_mode != CUDAGraphMode.FULL:
                return forward
            key = key_of(manager, desc)
            built = self._builders.current()

            def captured(mode: Any) -> None:
                inputs = {_SLOTS: _slots(built)}
                if self._buffers is not None:
                    inputs[type(self._buffers).__name__] = self._buffers
                with self._capturing(key, built, inputs), self._inputs_of(key):
                    forward(mode)

            return captured

        original(manager, create_forward_fn, *args, **kwargs)

    def _model_capture(
        self,
        original: Callable[..., Any],
        manager: Any,
        model: Any,
        model_state: Any,
        input_buffers: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._buffers, self._model = input_buffers, model
        try:
            original(manager, model, model_state, input_buffers, *args, **kwargs)
        finally:
            self._buffers = None

    @contextlib.contextmanager
    def _inputs_of(self, key: GraphKey) -> Iterator[None]:
        """Note with which arguments the model is called in the context."""
        if self._buffers is None:
            yield
            return

        def note(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
            del model, args
            self._model_inputs[key] = kwargs, get_forward_context()

        hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _replay(self, original: Callable[..., Any], manager: Any, desc: Any) -> Any:
        if self.guard is not None:
            is_target = isinstance(manager, ModelCudaGraphManager)  # drafts count lengths on the device
            self._check(key_of(manager, desc), {}, has_contents=is_target)
        return original(manager, desc)

    def _model_replay(self, original: Callable[..., Any], manager: Any, desc: Any) -> Any:
        key = key_of(manager, desc)
        if key not in self._model_inputs:  # captured before the guard was there
            return original(manager, desc)
        inputs, captured = self._model_inputs[key]

        def eager() -> Any:
            layers = {layer: each for each in self._builders.current().values() for layer in each.layers}
            with set_forward_context(
                {layer: each.metadata for layer, each in layers.items()},
                manager.vllm_config,
                num_tokens=desc.num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                num_tokens_across_dp=captured.dp_metadata and captured.dp_metadata.num_tokens_across_dp_cpu,
                is_padding=captured.is_padding,
                slot_mapping={
                    layer: each.common.slot_mapping
                    for layer, each in layers.items()
                    if each.common is not None
                },
            ):
                return self._model(**inputs)

        if self._is_refused(key):
            return self._in_place_of_a_replay(eager)
        output = original(manager, desc)
        if self._is_verify_due(key):
            self._verify(key, output, eager)
        return output

    # -- wrappers of a model or of its pieces ----------------------------------------------------

    def _call(self, original: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        call = call_of(wrapper)
        if call is None:
            return original(wrapper, *args, **kwargs)
        self._guard_of(wrapper.vllm_config)
        inputs = dict(_tensors(args, kwargs))
        built = self._builders.current()
        if call.graph is None:
            with self._capturing(call.key, built, {_INPUTS: inputs, _SLOTS: _slots(built)}):
                context, metadata = get_forward_context(), get_forward_context().attn_metadata
                context.attn_metadata = self._read_through(metadata)
                try:
                    return original(wrapper, *args, **kwargs)
                finally:
                    context.attn_metadata = metadata

        def eager() -> Any:
            context = copy.copy(get_forward_context())
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            with override_forward_context(context):
                return wrapper.runnable(*args, **kwargs)

        if self._is_refused(call.key):
            return self._in_place_of_a_replay(eager)
        self._check(call.key, inputs, has_contents=True)
        output = original(wrapper, *args, **kwargs)
        is_full = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL
        if is_full and self._is_verify_due(call.key):
            self._verify(call.key, output, eager)
        return output

    def _eager_call(self, original: Callable[..., Any], capture: Any, fn: Callable[[], Any]) -> Any:
        """Note no reads in an eager call between two segments."""
        with self.unwatched():
            return original(capture, fn)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Note no reads in the context, because the graph does not make them."""
        if self.guard is not None:
            self.guard.watch_reads(watching=False)
        try:
            yield
        finally:
            if self.guard is not None:
                self.guard.watch_reads(watching=True)

    # -- both ------------------------------------------------------------------------------------

    def _guard_of(self, vllm_config: Any) -> Guard:
        """Return the guard of this process, which is made at the first call."""
        if self.guard is None:
            self.guard = Guard(
                self._settings,
                _provenance(vllm_config),
                metadata=METADATA,
                limits=_LIMITS,
                unseen=_UNSEEN,
                rank=rank_name(vllm_config),
            )
            self._is_exact = has_exact_lengths(vllm_config)
            if self._settings.on_fault == "eager":
                self._agreement = agreement_of_ranks(vllm_config)
            log_at_exit(self.guard)
        return self.guard

    @contextlib.contextmanager
    def _capturing(self, key: GraphKey, built: Mapping[str, Built], inputs: dict[str, Any]) -> Iterator[None]:
        """Watch the capture of a graph.

        An object whose class cannot be changed is read through another one, which notes the reads. Layers
        find metadata in the forward context, so it is replaced there.
        """
        assert self.guard is not None  # noqa: S101  the callers have it
        held = {name: Held(each.metadata) for name, each in built.items()}
        with self.guard.capturing(key, held, inputs):
            self._readers = {id(each.metadata): held[name].metadata for name, each in built.items()}
            self._given.clear()
            try:
                yield
            finally:
                self._readers = {}
                # Builders of drafts have metadata too, which this graph's layers were not given.
                self._builders_of[key] = {
                    name for name, each in built.items() if id(each.metadata) in self._given
                }
                for name in built.keys() - self._builders_of[key]:
                    inputs[_SLOTS].pop(name, None)

    def _context(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if self._readers:
            context.attn_metadata = self._read_through(context.attn_metadata)
        return context

    def _read_through(self, metadata: Any) -> Any:
        """Return metadata by layer, or a list of it for micro-batches, with the objects that note reads."""
        if isinstance(metadata, list):
            return [self._read_through(each) for each in metadata]
        if not isinstance(metadata, dict):
            return metadata
        self._given.update(map(id, metadata.values()))
        return {layer: self._readers.get(id(each), each) for layer, each in metadata.items()}

    def _check(self, key: GraphKey, inputs: dict[str, Any], *, has_contents: bool) -> None:
        """Check the replay of ``key`` that follows."""
        guard = self.guard
        assert guard is not None  # noqa: S101  the callers have it
        built = self._builders.current()
        for name, each in built.items():
            guard.prepared(name, each.metadata, "metadata")
        names = self._builders_of.get(key, built.keys())
        guard.passed(_SLOTS, _slots({name: each for name, each in built.items() if name in names}))
        if inputs:
            guard.passed(_INPUTS, inputs)
        guard.replaying(key)
        if has_contents and self._is_exact and guard.is_contents_due(key):
            expected = [*expected_of(built, guard.records[key].leaves(), is_dummy=self._builders.is_dummy)]
            if expected:
                guard.check_contents(key, expected)

    def _is_refused(self, key: GraphKey) -> bool:
        """Return whether a rank refused the graph after a fault; all ranks ask in each of their replays."""
        if self._agreement is None or self.guard is None:
            return False
        self.guard.refused = self._agreement.update(self.guard.refused)
        return key in self.guard.refused

    def _in_place_of_a_replay(self, eager: Callable[[], Any]) -> Any:
        with self._counts.because("the guard refused the graph after a fault"):
            return eager()

    def _is_verify_due(self, key: GraphKey) -> bool:
        """Return whether the last replay of ``key`` is compared; an eager run advances recurrent state."""
        if self.guard is None or not self.guard.is_verify_due(key):
            return False
        return not any(each.is_recurrent for each in self._builders.current().values())

    def _verify(self, key: GraphKey, output: Any, eager: Callable[[], Any]) -> None:
        """Compare the output of a replay with that of an eager run on the same inputs.

        An idle rank runs its batch of no rows eagerly too, because the others wait for it in collectives.
        """
        assert self.guard is not None  # noqa: S101  the callers have it
        rows = self._builders.num_tokens(self._builders_of.get(key))
        kept = [(tensor, tensor.clone()) for _, tensor in _outputs(output)]
        replayed = {name: tensor[:rows].clone() for name, tensor in _outputs(output)}
        with torch.inference_mode(), self._counts.paused():
            expected = {name: tensor[:rows] for name, tensor in _outputs(eager())}
            for tensor, before in kept:  # the eager run may have used the same memory
                tensor.copy_(before)
        if rows != 0:
            self.guard.verify(key, replayed, expected)


def _slots(built: Mapping[str, Built]) -> dict[str, torch.Tensor]:
    """Return the slot mapping of each builder's layers, which layers read beside the metadata."""
    return {name: each.common.slot_mapping for name, each in built.items() if each.common is not None}


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors among the arguments of a model or a piece, by name."""
    for name, value in [*((f"{at}", each) for at, each in enumerate(args)), *kwargs.items()]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif hasattr(value, "tensors"):  # those of the last stage of a pipeline
            yield name, dict(value.tensors)


def _outputs(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the outputs of a model that are compared, by name."""
    first, *rest = output if isinstance(output, tuple) else (output,)
    if isinstance(first, torch.Tensor):
        yield "hidden_states", first
    for layers in rest:
        for at, tensor in enumerate(layers):
            yield f"aux_hidden_states[{at}]", tensor


def _provenance(vllm_config: Any) -> dict[str, str]:
    """Return what runs here, for reports.

    The attention backends are named by their classes: all that come from outside are ``CUSTOM`` in vLLM.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = {each.get_attn_backend() for each in layers if hasattr(each, "get_attn_backend")}
    return {
        "vllm": installed_release(),
        "model": str(vllm_config.model_config.model),
        "attention": ", ".join(sorted(f"{each.__module__}.{each.__qualname__}" for each in backends)),
        "rank": rank_of_all(vllm_config),
    }
