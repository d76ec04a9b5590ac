"""`SglangGuard`: the guard in SGLang, by hooks around the captures and replays of its graph backends.

SGLang's graph backends capture and replay for every runner, so two classes are enough: decode, verify, draft
and prefill runners use them. A graph is named by its runner and its key there.

Does not: see graphs that other code captures by ``torch.cuda.CUDAGraph``, such as SGLang's metadata glue
graph.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, PrefillCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.plugins.hook_registry import HookType

from graphpact_guard import (
    Expected,
    GraphKey,
    GraphRecord,
    Guard,
    RankAgreement,
    Settings,
    StepRecording,
    log_at_exit,
)
from graphpact_sglang.guard.contents import DecodeRows, expected_inputs, expected_metadata
from graphpact_sglang.guard.draft_contents import Live, expected_draft, expected_extend, live_draft
from graphpact_sglang.guard.live_tokens import expected_count_of_capture
from graphpact_sglang.guard.prefill_contents import expected_prefill_inputs, expected_prefill_metadata
from graphpact_sglang.guard.recording import StepHooks
from graphpact_sglang.seams.hooking import register_hook
from graphpact_sglang.seams.ranks import agreement_of_ranks, rank_labels, rank_name, rank_of_all
from graphpact_sglang.seams.runners import (
    METADATA,
    counts_tokens,
    is_a,
    key_of,
    metadata_of,
    named_backends,
    static_inputs,
    step_metadata,
)
from graphpact_sglang.seams.steps import (
    BREAKABLE,
    DECODE,
    DRAFT,
    DRAFT_EXTEND,
    FULL,
    PREFILL,
    RUNNERS,
    SEGMENTS,
    SRT,
    StepCounts,
)

_MODEL_RUNNER = f"{SRT}.model_runner.ModelRunner"
_LIMITS = ("max_seq_len_q", "max_seq_len_k")
"""Numbers of metadata that only bound a kernel. Full prefill graphs of all sizes share the smallest one's."""
INVARIANTS = "graphpact_invariants"
"""The attribute by which an attention backend declares invariants of its plan: predicates by name, each a
function of the backend and of the batch that is replayed. They are checked before every replay."""
_UNSEEN = "graphs that other code captures by torch.cuda.CUDAGraph, and memory that kernels reach by pointers"

_METRICS_SECONDS = 5.0
"""How often metrics are written."""


class SglangGuard:
    """The hooks of the guard. The guard itself is made at the first capture of the process.

    If steps are recorded, it is made at the first step, if that comes first.

    Args:
        settings: What is asked for.
        counts: The counts of steps, which leave out the synthetic ones.

    Attributes:
        guard: The guard; None before the first capture.
    """

    def __init__(self, settings: Settings, counts: StepCounts) -> None:
        self.guard: Guard | None = None
        self._settings, self._counts = settings, counts
        # The graph of the last replay.
        self._replayed: GraphKey | None = None
        # The attention backends of each graph, by name.
        self._owners: dict[GraphKey, dict[str, Any]] = {}
        # By id of a backend: its metadata by attribute before a preparation.
        self._before: dict[int, dict[str, Any]] = {}
        # The live batch of the last draft.
        self._live_draft: Live = {}
        # Keeps refused graphs equal on all ranks; None if none is refused.
        self._agreement: RankAgreement | None = None

    def register(self) -> None:
        """Register the hooks."""
        full = functools.partial(self._capture_one, in_segments=False)
        in_segments = functools.partial(self._capture_one, in_segments=True)
        hooks: list[tuple[str, Callable[..., Any], HookType]] = [
            (f"{FULL}.capture_one", full, HookType.AROUND),
            (f"{FULL}.replay", self._replay, HookType.AROUND),
            (f"{BREAKABLE}.capture_one", in_segments, HookType.AROUND),
            (f"{BREAKABLE}.replay", self._replay, HookType.AROUND),
            (f"{DECODE}.execute", self._execute, HookType.AROUND),
            (f"{DRAFT}.execute", self._draft_begins, HookType.BEFORE),
            (f"{DRAFT_EXTEND}.execute", self._execute_extend, HookType.AROUND),
            *((f"{runner}.can_run_graph", self._can_run, HookType.AFTER) for runner in RUNNERS),
            (f"{PREFILL}.load_batch", self._load_prefill, HookType.AROUND),
            (f"{SEGMENTS}._begin_new_segment", self._segment_begun, HookType.AFTER),
            (f"{SEGMENTS}._end_current_segment", self._segment_ends, HookType.BEFORE),
        ]
        if self._settings.start:
            hooks += [
                (f"{PREFILL}.execute", self._execute, HookType.AROUND),
                (f"{_MODEL_RUNNER}.init_cuda_graphs", self._start, HookType.AFTER),
            ]
        for target, hook, kind in hooks:
            register_hook(target, hook, kind)
        if self._settings.record is not None:
            StepHooks(self._recording).register()

    def _recording(self, model_runner: Any) -> StepRecording | None:
        """Return the recording of this process; None while a graph is captured, and in synthetic steps."""
        if self.guard is None:
            self.guard = self._make_guard(model_runner)
        is_engine_step = not self.guard.is_capturing and not self.guard.log.is_starting
        return self.guard.recording if is_engine_step else None

    def _capture_one(
        self,
        original: Callable[..., Any],
        graph_backend: Any,
        shape_key: Any,
        *args: Any,
        in_segments: bool,
        **kwargs: Any,
    ) -> Any:
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001  both backends have it
        if self.guard is None:
            self.guard = self._make_guard(runner.model_runner)
        owners = dict(named_backends(runner))
        for backend in owners.values():
            self._watch_preparation(backend, [*owners.values()])
        key = key_of(runner, shape_key)
        self._owners[key] = owners
        inputs = dict(static_inputs(runner))
        with self.guard.capturing(key, owners, inputs, in_segments=in_segments):
            result = original(graph_backend, shape_key, *args, **kwargs)
        counts = expected_count_of_capture(runner, shape_key.size)
        self.guard.report(*(fault for each in counts if (fault := each.fault(key)) is not None))
        return result

    def _make_guard(self, model_runner: Any) -> Guard:
        """Make the guard of this process, and let it report to SGLang's metrics and to the log at the end."""
        if self._settings.on_fault == "eager":
            self._agreement = agreement_of_ranks(model_runner.server_args)
        guard = Guard(
            self._settings,
            _provenance(model_runner),
            metadata=METADATA,
            limits=_LIMITS,
            unseen=_UNSEEN,
            rank=rank_name(),
        )
        if not model_runner.server_args.enable_metrics:
            log_at_exit(guard)
            return guard
        from graphpact_guard.metrics import GuardMetrics  # noqa: PLC0415  only now SGLang has chosen the mode

        metrics = GuardMetrics(guard, rank_labels())
        metrics.update_every(_METRICS_SECONDS)
        log_at_exit(guard, before=metrics.update)
        return guard

    def _replay(
        self,
        original: Callable[..., Any],
        graph_backend: Any,
        shape_key: Any,
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001
        if self.guard is not None:
            key = self._replayed = key_of(runner, shape_key)
            for owner, backend in self._owners.get(key, {}).items():
                for name, before in self._before.get(id(backend), {}).items():
                    now = getattr(backend, name)
                    self.guard.prepared(owner, None if now is before else now, name)
            self._before.clear()
            self.guard.replaying(key)
            self._check_invariants(key, batch)
            if self.guard.is_contents_due(key):
                expected = [*self._expected(runner, batch, self.guard.records[key])]
                if expected:
                    self.guard.check_contents(key, expected)
        return original(graph_backend, shape_key, batch, *args, **kwargs)

    def _expected(self, runner: Any, batch: Any, record: GraphRecord) -> Iterator[Expected]:
        """Yield what a graph must find before its replay; prefill graphs are checked when they are loaded."""
        if type(runner) is DecodeCudaGraphRunner:
            yield from expected_inputs(runner, batch)
            yield from expected_metadata(DecodeRows.of(runner), record.leaves())
        elif is_a(runner, DRAFT):
            yield from expected_draft(runner, self._live_draft)
        elif is_a(runner, DRAFT_EXTEND):
            yield from expected_extend(runner, batch, record.leaves())

    def _draft_begins(self, runner: Any, batch: Any) -> None:
        """Keep the live batch of a draft, which its runner pads in place."""
        del runner
        self._live_draft = live_draft(batch)

    def _load_prefill(self, original: Callable[..., Any], runner: Any, batch: Any, **kwargs: Any) -> Any:
        """Check what a prefill runner has loaded; later the model may write its static inputs."""
        if self.guard is None or not self.guard.settings.contents:
            return original(runner, batch, **kwargs)
        before = step_metadata(runner)
        loaded = original(runner, batch, **kwargs)
        static = loaded[0] if isinstance(loaded, tuple) else loaded
        key = key_of(runner, runner._shape_key(len(static.input_ids), batch))  # noqa: SLF001
        if self.guard.is_contents_due(key, ahead=True):
            now = step_metadata(runner)
            made = {name: metadata for name, metadata in now.items() if metadata is not before[name]}
            self.guard.check_contents(
                key,
                [
                    *expected_prefill_inputs(runner, batch, static),
                    *expected_prefill_metadata(runner, batch, static, self.guard.records[key].leaves(), made),
                ],
            )
        return loaded

    def _can_run(self, result: Any, runner: Any, batch: Any) -> bool | None:
        """Return False for a batch whose graph the guard refused; None leaves SGLang's answer."""
        if not result or self.guard is None or self._agreement is None or self.guard.log.is_starting:
            return None
        self.guard.refused = self._agreement.update(self.guard.refused)
        if not self.guard.refused:
            return None
        is_prefill = counts_tokens(runner)
        sizes = runner.capture_num_tokens if is_prefill else runner.capture_bs
        size = len(batch.input_ids) if is_prefill else batch.batch_size
        graph = key_of(runner, ShapeKey(size=min(each for each in sizes if each >= size)))
        refused = {(key.runner, key.shape.partition(",")[0]) for key in self.guard.refused}
        if (graph.runner, graph.shape) not in refused:
            return None
        batch.graphpact_refused = True  # for the reason of the eager step
        return False

    def _execute(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._take_replayed()  # that of another runner
        output = original(runner, batch, *args, **kwargs)
        model_runner = runner.model_runner

        def run(again: Any, *args: Any, **kwargs: Any) -> Any:
            # A batch of ranks that step together is padded for graphs by their runner, else by these two.
            is_unpadded = again.global_num_tokens_cpu is not None and again.dp_padding_mode is None
            if is_unpadded:
                model_runner._prepare_eager_forward_batch(again)  # noqa: SLF001  no other way
            result = model_runner.eager_runner.execute(again, *args, **kwargs)
            if is_unpadded:
                again.post_forward_mlp_sync_batch(result)
            return result

        self._verify(runner, output, lambda: _outputs(_run_again(runner, run, batch, *args, **kwargs)))
        return output

    def _execute_extend(
        self, original: Callable[..., Any], runner: Any, batch: Any, select_index: torch.Tensor | None = None
    ) -> Any:
        if select_index is None:  # 0.5.19 selects rows by other rules, so its draft extends are not verified
            return original(runner, batch)
        if self.guard is None or not self.guard.settings.verify:
            return original(runner, batch, select_index)
        self._take_replayed()
        before = copy.copy(batch)
        draft = before.spec_info = copy.copy(batch.spec_info)  # its runner pads the draft in place
        if draft.hidden_states is not None:  # None: the draft is a whole model
            # An output of the graph that verified; the next replay may reuse its memory.
            draft.hidden_states = draft.hidden_states.clone()
        output = original(runner, batch, select_index)

        def eager() -> Iterator[tuple[str, torch.Tensor]]:
            """Yield the outputs of the selected rows: only a graph selects them before the last layer."""
            again = _run_again(runner, runner.model_runner.forward, before)
            for name, tensor in _outputs(again.logits_output):
                yield name, tensor[select_index]

        self._verify(runner, output, eager)
        return output

    def _verify(
        self, runner: Any, output: Any, eager: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        """Compare the outputs of a replay with those of an eager run, if that is due."""
        key = self._take_replayed()
        if self.guard is None or key is None:
            return
        if not self.guard.is_verify_due(key) or _has_recurrent_state(runner):
            return
        if isinstance(runner, PrefillCudaGraphRunner) and not self.guard.log.is_starting:
            return
        replayed = {name: tensor.clone() for name, tensor in _outputs(output)}
        expected = dict(eager())
        # Some eager runs return no hidden states, because nothing reads them.
        self.guard.verify(key, {name: replayed[name] for name in expected}, expected)
        with torch.inference_mode():  # the model's tensors are inference tensors
            for name, tensor in _outputs(output):  # the eager run may have used the same memory
                tensor.copy_(replayed[name])

    def _take_replayed(self) -> GraphKey | None:
        key, self._replayed = self._replayed, None
        return key

    def _start(self, result: None, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        """Verify synthetic steps of each captured shape; all ranks refuse what one refuses."""
        del result, args, kwargs
        if self.guard is None or model_runner.is_draft_worker:
            return
        from graphpact_sglang.guard.start import run_start  # noqa: PLC0415  it imports SGLang's scheduler

        self._counts.is_paused = True
        try:
            with self.guard.starting() as synthetic:
                synthetic.shapes = run_start(model_runner, self._settings.start)
                if self._agreement is not None:
                    self.guard.refused = self._agreement.update(self.guard.refused)
        finally:
            self._counts.is_paused = False

    def _check_invariants(self, key: GraphKey, batch: Any) -> None:
        assert self.guard is not None  # noqa: S101  the caller has it
        for owner, backend in self._owners.get(key, {}).items():
            declared = getattr(backend, INVARIANTS, None)
            if declared:
                holds = {text: bool(predicate(backend, batch)) for text, predicate in declared.items()}
                self.guard.check_invariants(key, owner, holds)

    def _watch_preparation(self, backend: Any, owners: list[Any]) -> None:
        """Note the metadata of all ``owners`` before each preparation by ``backend``, one of them."""
        original = backend.init_forward_metadata_out_graph
        if getattr(original, "is_watched", False):
            return

        @functools.wraps(original)
        def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            for owner in owners:
                self._before.setdefault(id(owner), metadata_of(owner))
            return original(forward_batch, *args, **kwargs)

        watched.is_watched = True  # type: ignore[attr-defined]
        backend.init_forward_metadata_out_graph = watched

    def _segment_begun(self, result: None, capture: Any) -> None:
        del result, capture
        if self.guard is not None:
            self.guard.watch_reads(watching=True)

    def _segment_ends(self, capture: Any) -> None:
        del capture
        if self.guard is not None:
            self.guard.watch_reads(watching=False)


def _outputs(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the outputs that are compared, by name."""
    for name in ("next_token_logits", "hidden_states"):
        tensor = getattr(output, name, None)
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _run_again(runner: Any, run: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a batch again by ``run``, which is eager, with metadata of its own; keys are written alike."""
    before = [(backend, metadata_of(backend)) for _, backend in named_backends(runner)]
    again = _paddable_copy(batch)
    again.forward_metadata_ready = False
    again.graphpact_verifies = True  # no step of the engine: see `StepCounts`
    try:
        return run(again, *args, **kwargs)
    finally:
        for backend, metadata in before:
            for name, its in metadata.items():
                setattr(backend, name, its)


def _paddable_copy(batch: Any) -> Any:
    """Return a copy of a batch that can be padded: SGLang pads what these members hold, or writes them."""
    again = copy.copy(batch)
    for name in ("spec_info", "sampling_info", "lora_ids"):
        setattr(again, name, copy.copy(getattr(batch, name)))
    for name in ("global_num_tokens_gpu", "global_num_token_non_padded"):
        counts = getattr(batch, name, None)
        if counts is not None:
            setattr(again, name, counts.clone())
    return again


def _has_recurrent_state(runner: Any) -> bool:
    """Return whether an eager run would advance a state a second time."""
    return isinstance(runner.model_runner.req_to_token_pool, HybridReqToTokenPool)


def _provenance(model_runner: Any) -> dict[str, str]:
    """Return what runs here, for reports."""
    attention = type(model_runner.attn_backend)
    return {
        "sglang": version("sglang"),
        "model": str(model_runner.server_args.model_path),
        "attention": f"{attention.__module__}.{attention.__qualname__}",
        "rank": rank_of_all(),
    }
