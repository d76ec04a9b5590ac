"""`Engine`: prompts in, text out, every step through a lane.

    engine = Engine(EngineConfig.load(Path("engine.toml")))
    for completion in engine.generate(["Return a ", "The "]):
        print(completion.text)

Does not: serve a network, or run two steps at once.
"""

import contextlib
import functools
import logging
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import ContractError, EngineError, UsageError
from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact.shapes import GraphShape
from graphpact.step import StepOutputs
from graphpact_engine.build import (
    OnCapture,
    backend_context,
    build_lane,
    build_observers,
    build_speculator,
    lay_out_memory,
    model_path,
    require_each_can_run,
)
from graphpact_engine.config import EngineConfig, LaneMode
from graphpact_engine.deltas import DeltaStream
from graphpact_engine.errors import CheckpointError, ModelCaptureError, RequestError
from graphpact_engine.faults import names_plugins
from graphpact_engine.logs import log_event
from graphpact_engine.phases import EnginePhases
from graphpact_engine.plans import (
    LanePlan,
    ModelName,
    ModelSpec,
    check_backends,
    choose_async,
    lane_without_latents,
    plan_lanes,
    require_observers,
    resolve_device,
    select_algorithm,
    select_observers,
)
from graphpact_engine.prompts import Prompt, encode, list_prompts, require_tokens
from graphpact_engine.request import FinishReason, Request, SamplingParams
from graphpact_engine.sampler import PendingTokens, Sampler
from graphpact_engine.scheduler import ScheduledBatch, Scheduler
from graphpact_engine.text import OutputText
from graphpact_engine.threads import choose_num_threads, running_on
from graphpact_engine.verify import Verifier

_log = logging.getLogger(__name__)

Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""The sampling parameters of all prompts, or one for each prompt; None: the defaults."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    Args:
        index: Index of the prompt in the call.
        prompt: The prompt, as it was given.
        text: The generated text, up to a stop string; empty if the checkpoint has no tokenizer.
        token_ids: The generated tokens, with the one that completed a stop string.
        finish_reason: Why it ended.
    """

    index: int
    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Flight:
    """A decode step that was launched and not committed.

    Args:
        scheduled: The step.
        tokens: Its tokens.
    """

    scheduled: ScheduledBatch
    tokens: PendingTokens

    @property
    def is_vain(self) -> bool:
        """Whether every request of it has ended."""
        return all(request.is_finished for request in self.scheduled.requests)


class Engine:
    """A model, the lanes that run it, and the loop that feeds them.

    Args:
        config: The configuration.
        catalog: The plugins to select from; by default the installed ones.
        on_capture: Called after each captured shape.
        observers: Hook wrappers for every lane, the outermost first. They wrap the observers of the
            configuration; verification and the guard of a strict lane wrap them.

    Attributes:
        lanes: Every `graphpact.Lane`, with its ``name``, ``stats``, ``runner``, ``backend`` and ``driver``.
        is_async: Whether decode steps are launched before the tokens of the step before are read.
        breaches: Steps that ended because the contract was broken, by rule and class of the error.

    Raises:
        UsageError: A name, value, checkpoint or model cannot be used; nothing was captured.
        CaptureError: Capturing a shape failed.
    """

    @names_plugins
    def __init__(
        self,
        config: EngineConfig,
        *,
        catalog: PluginCatalog | None = None,
        on_capture: OnCapture | None = None,
        observers: Sequence[object] = (),
    ) -> None:
        start = time.perf_counter()
        self.config = config
        self.device = resolve_device(config.engine.device)
        catalog = catalog or PluginCatalog.scan()
        algorithm = select_algorithm(config, catalog)
        self.is_async = choose_async(config, self.device)
        plans = plan_lanes(config, catalog, self.device, algorithm)
        configured = select_observers(config, catalog)
        require_observers(observers)
        path = model_path(config)

        from graphpact_engine import models  # noqa: PLC0415  an extra that takes seconds to import

        dtype = config.model.dtype
        checkpoint = models.load_checkpoint(
            path,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            device=self.device,
            attention=models.ATTENTION_NAME,
            trust_remote_code=config.model.trust_remote_code,
        )
        self._load_tokenizer: Callable[[], Any] = functools.partial(
            models.load_tokenizer, path, trust_remote_code=config.model.trust_remote_code
        )
        self._tokenizer: Any = None
        expanding = lane_without_latents(plans)
        self.model = models.TransformersModel(checkpoint.model, absorb=expanding is None)
        self.vocab_size = checkpoint.vocab_size
        self._generation = checkpoint.generation
        self.eos_token_ids = checkpoint.generation.eos_token_ids
        specs: dict[ModelName, ModelSpec] = {
            "target": ModelSpec(
                self.model.layers,
                self.model.dtype,
                self.device,
                checkpoint.max_model_len,
                has_experts=self.model.has_experts,
                expanded_for=expanding if self.model.has_latents else None,
                expanded_layers=(lambda: models.TransformersModel(checkpoint.model).layers)
                if self.model.has_latents and expanding is None
                else None,
            )
        }
        runs: dict[ModelName, Any] = {"target": self.model}
        self.draft_model = self._load_draft_model()
        if self.draft_model is not None:
            specs["draft"] = _spec_of_draft(self.draft_model, self.model.dtype, self.device)
            runs["draft"] = self.draft_model
        self.memory = lay_out_memory(config, specs)
        contexts = [
            backend_context(plan, specs[plan.model], self.memory, self.memory.kv_cache) for plan in plans
        ]
        check_backends(plans, contexts, catalog, specs)
        # Each lane has the given observers, and configured ones of its own.
        observing = [[*observers, *build_observers(configured)] for _ in plans]
        sampler, phases = Sampler(self.eos_token_ids), EnginePhases(observing[0])
        self._sample = phases.observed("sample", sampler.sample)
        self._start_sampling = phases.observed("sample", sampler.start)
        self.speculation = None
        if algorithm is not None:
            sample_after = phases.observed("sample", sampler.sample_after)
            self.speculation = build_speculator(
                algorithm, config, self.model, self.draft_model, self.memory, sample_after, self._run_lane
            )
        self.lanes: list[Lane] = []
        self.verifiers: list[Verifier] = []
        self._lanes_of: dict[LaneMode, list[Lane]] = {}
        self._build_lanes(plans, runs, specs, observing, on_capture)
        weights = sum(weight.nbytes for run in runs.values() for _, weight in run.named_weights())
        self.num_threads = choose_num_threads(config.engine.num_threads, self.device, weights)
        self._capture()
        self.scheduler = Scheduler(
            self.memory.requests,
            self.memory.pages,
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
            max_model_len=self.memory.max_model_len,
            eos_token_ids=self.eos_token_ids,
            device=self.device,
            num_reserved=self.memory.num_reserved,
            max_prefill_chunk=config.engine.max_prefill_chunk,
            mixed=any(plan.mode is ForwardMode.MIXED for plan in plans),
        )
        self._observe(phases)
        self._num_requests = 0
        self._is_stepping = False
        self._to_abort: list[Request | str] = []  # aborted during a step
        log_event(
            _log,
            logging.INFO,
            "engine started",
            device=str(self.device),
            lanes=",".join(lane.name for lane in self.lanes),
            shapes=sum(len(lane.shapes) for lane in self.lanes),
            seconds=round(time.perf_counter() - start, 3),
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint, loaded on first access.

        Raises:
            CheckpointError: The checkpoint has no tokenizer, or a broken one.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @property
    def recommended_sampling(self) -> Mapping[str, float]:
        """The temperature, top_p, top_k and min_p that the checkpoint recommends; empty for greedy.

        They are not applied by themselves: ``SamplingParams(**engine.recommended_sampling)``.
        """
        return self._generation.recommended

    @names_plugins
    def close(self) -> None:
        """Release the graphs of every lane. Later steps of the engine run eagerly.

        Raises:
            EngineError: A driver failed to release a graph; every other graph was released.
        """
        with contextlib.ExitStack() as stack:
            for lane in self.lanes:
                stack.callback(lane.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EngineError as fault:
            if error is None:
                raise
            error.add_note(f"and then: {fault}")  # the first error is the one to tell

    # -- one request, one step -------------------------------------------------------------------

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Request:
        """Queue one prompt.

        A request without a seed uses ``engine.seed`` plus its number: equal prompts get different
        outputs, and a run can be repeated.

        Raises:
            RequestError: The prompt is no prompt, is empty or too long for this engine, or it or the sampling
                parameters have a token id outside the vocabulary; nothing was queued.
            CheckpointError: Text or stop strings need a tokenizer, and the checkpoint has none.
        """
        number = self._num_requests
        token_ids = encode(prompt, lambda: self.tokenizer)
        require_tokens(token_ids, self.vocab_size, "the prompt has")
        request = Request(
            str(number),
            token_ids,
            self._complete(sampling, len(token_ids)),
            default_seed=self.config.engine.seed + number,
        )
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    @names_plugins
    def step(self) -> list[Request]:
        """Run one batch and return the requests that received a token.

        If the model fails, no request changes, and the next call repeats the step. With asynchronous
        scheduling a call also launches the step after the one whose tokens it returns, if that can be.

        Raises:
            UsageError: A step of this engine is running: in another thread, or around this call.
        """
        if self._is_stepping:
            raise UsageError(
                "a step of this engine is already running",
                hint="call an engine from one thread, and not from an observer",
            )
        self._is_stepping = True
        try:
            return self._run_step(self)
        except ContractError as error:
            self._tell_breach(error)
            raise
        finally:
            self._is_stepping = False
            while self._to_abort:
                self.scheduler.abort(self._to_abort.pop())

    def abort(self, request: Request | str) -> bool:
        """End a request and free its memory; during a step, at the end of the step.

        Args:
            request: The request or its id.

        Returns:
            Whether the request was alive. A request that has ended, or of another engine, is left alone.

        Raises:
            RequestError: ``request`` is neither a request nor an id.
        """
        if not isinstance(request, Request | str):
            raise RequestError(
                f"cannot abort {reprlib.repr(request)}: it is no request",
                hint="give what `Engine.add` returned, or its request_id",
            )
        if self._is_stepping:  # garbage collection may close a stream at any time
            self._to_abort.append(request)
            return self.scheduler.is_alive(request)
        return self.scheduler.abort(request)

    def text_of(self, request: Request) -> str:
        """Return the text that a request has generated so far, as far as it may be shown.

        An incomplete character at the end is left out, and what may be the beginning of a stop string.
        """
        return "".join(self._read(request).pieces)

    @names_plugins
    def lane_of(self, batch: ForwardBatch) -> Lane:
        """Return the lane that runs a decode, extend or mixed ``batch`` of the target model.

        It is the first lane of its mode with a shape that fits. If none fits, it is the first lane of the
        mode, which runs the batch eagerly.
        """
        return self._lane_for("decode" if batch.forward_mode.is_decode else "prefill", batch)

    def _run_lane(self, mode: str, batch: ForwardBatch) -> StepOutputs:
        """Run a batch in the lane of ``mode`` that has a shape for it; for a speculation algorithm."""
        return self._run_in(self._lane_for(cast("LaneMode", mode), batch), batch)

    def _run_in(self, lane: Lane, batch: ForwardBatch) -> StepOutputs:
        """Run a batch in a lane, with the number of its tokens if the lane's graphs read it."""
        is_read = lane.shapes and lane.runner.context.num_token_non_padded
        outputs = lane.run(_counted(batch) if is_read else batch)
        if len(lane.stats.eager) > self._num_reasons[lane]:
            self._tell_reason(lane, batch)
        return outputs

    def _lane_for(self, mode: LaneMode, batch: ForwardBatch) -> Lane:
        lanes = self._lanes_of[mode]
        if len(lanes) == 1:
            return lanes[0]
        return next((lane for lane in lanes if isinstance(lane.fit(batch), GraphShape)), lanes[0])

    # -- many prompts ----------------------------------------------------------------------------

    def stream(self, prompts: Iterable[Prompt], sampling: Sampling = None) -> DeltaStream:
        """Continue all prompts together and return an iterator of their tokens, as they are generated.

        The prompts are queued at once. Several streams may take turns, and generate together: each gets
        its own tokens. Closing a stream, or dropping it, aborts its requests.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        listed = list_prompts(prompts)
        each = _sampling_of_each(sampling, len(listed))
        requests: list[Request] = []
        try:
            for prompt, its_sampling in zip(listed, each, strict=True):
                requests.append(self.add(prompt, its_sampling))
        except BaseException as error:
            for request in requests:
                self.abort(request)
            if isinstance(error, RequestError):
                which = f"prompt {len(requests) + 1} of {len(listed)}"
                raise RequestError(f"{which}: {error.message}", hint=error.hint) from error
            raise
        return DeltaStream(requests, step=self.step, read=self._read, abort=self.abort)

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling = None) -> list[Completion]:
        """Continue all prompts together and return the completions in the prompts' order.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        listed = list_prompts(prompts)
        with self.stream(listed, sampling) as stream:
            for _ in stream:
                pass
        return [
            Completion(
                i,
                prompt,
                self.text_of(request),
                list(request.output_token_ids),
                request.finish_reason or "abort",
            )
            for i, (prompt, request) in enumerate(zip(listed, stream.requests, strict=True))
        ]

    # -- inside ----------------------------------------------------------------------------------

    def _build_lanes(
        self,
        plans: Sequence[LanePlan],
        runs: Mapping[ModelName, Any],
        specs: Mapping[ModelName, ModelSpec],
        observing: Sequence[Sequence[object]],
        on_capture: OnCapture | None,
    ) -> None:
        """Build a lane for each plan, with its observers, without capturing."""
        states = () if self.speculation is None else tuple(self.speculation.state.values())
        for plan, observers in zip(plans, observing, strict=True):
            lane, verifier = build_lane(
                plan,
                self.config,
                model=runs[plan.model],
                spec=specs[plan.model],
                memory=self.memory,
                states=states,
                observers=observers,
                on_capture=on_capture,
            )
            self.lanes.append(lane)
            self._lanes_of.setdefault(plan.role, []).append(lane)
            if verifier is not None:
                self.verifiers.append(verifier)
        for lanes in self._lanes_of.values():
            require_each_can_run(lanes)

    def _capture(self) -> None:
        """Capture every shape of every lane."""
        with running_on(self.num_threads):
            for lane in self.lanes:
                try:
                    lane.capture_all()
                except ModelCaptureError as error:
                    setting = f"--set lanes.{lane.name}.capture=false"
                    error.hint = f"the line is the model's own; run the lane without graphs: {setting}"
                    raise

    def _observe(self, phases: EnginePhases) -> None:
        """Wrap the phases around the lanes; begin to count."""
        self.breaches: Counter[tuple[str, str]] = Counter()
        self._num_reasons = dict.fromkeys(self.lanes, 0)  # of eager runs that were logged
        self._flight: _Flight | None = None
        self._schedule = phases.observed("schedule", self.scheduler.schedule)
        self._schedule_ahead = phases.observed("schedule", self.scheduler.schedule_ahead)
        self._wait = phases.observed("wait", PendingTokens.read)
        self._commit = phases.observed("commit", self.scheduler.commit)
        # No bound method: the engine would be in a cycle, and its memory would wait for the collector.
        step: Callable[[Engine], list[Request]] = Engine._step
        self._run_step = phases.observed("step", step)

    def _step(self) -> list[Request]:
        """Run one batch, or with asynchronous scheduling a part of two; see `step`."""
        flight, self._flight = self._flight, None
        if flight is None or flight.is_vain:  # its requests may have been aborted since
            scheduled = self._schedule()
            if scheduled is None:
                return []
            if not self.is_async or not scheduled.batch.forward_mode.is_decode:
                with running_on(self.num_threads):
                    tokens = self._run(scheduled)
                return self._commit(scheduled, tokens, lambda request: self._read(request).is_stopped)
            flight = self._launch(scheduled)
        return self._finish(flight)

    def _launch(self, scheduled: ScheduledBatch, *, ahead: int = 0) -> "_Flight":
        """Run a decode step and choose its tokens, without waiting for the device.

        Args:
            scheduled: The step.
            ahead: The number of steps in flight before it.
        """
        with running_on(self.num_threads):
            logits = self._run_in(self.lane_of(scheduled.batch), scheduled.batch).logits
            tokens = self._start_sampling(logits, scheduled.requests, ahead=ahead)
        return _Flight(scheduled, tokens)

    def _finish(self, flight: "_Flight") -> list[Request]:
        """Launch the step after the one in flight, if that can be; then wait for the latter and commit it."""
        following = None
        try:
            if flight.tokens.is_free:
                scheduled = self._schedule_ahead(flight.tokens.tokens)
                following = None if scheduled is None else self._launch(scheduled, ahead=1)
        except BaseException:  # the step in flight is sound
            self.scheduler.forget(ahead_only=True)
            self._flight = flight
            raise
        try:
            tokens = [[token] for token in self._wait(flight.tokens)]
            got = self._commit(flight.scheduled, tokens, lambda request: self._read(request).is_stopped)
        except BaseException:
            self.scheduler.forget()
            raise
        self._flight = None if following is None or following.is_vain else following
        return got

    def _run(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Run a scheduled batch and return the tokens of each of its requests."""
        speculation = self.speculation
        if speculation is not None:
            is_decode = scheduled.batch.forward_mode.is_decode
            return speculation.decode(scheduled) if is_decode else speculation.extend(scheduled)
        logits = self._run_in(self.lane_of(scheduled.batch), scheduled.batch).logits
        if not scheduled.all_sample:
            logits = logits[scheduled.sampled_indices]
        return scheduled.tokens_of(self._sample(logits, scheduled.sampled_requests))

    def _tell_reason(self, lane: Lane, batch: ForwardBatch) -> None:
        """Log that a batch ran eagerly for a reason for which none did before in its lane and mode."""
        (mode, reason) = [*lane.stats.eager][-1]
        self._num_reasons[lane] = len(lane.stats.eager)
        log_event(
            _log,
            logging.INFO,
            "eager run",
            lane=lane.name,
            mode=mode.value,
            reason=reason.name,
            why=reason.text,
            batch_size=batch.batch_size,
            num_tokens=batch.num_tokens,
        )

    def _tell_breach(self, error: ContractError) -> None:
        """Count and log an error of the contract, which ended a step."""
        rule, kind = error.rule or "", type(error).__name__
        self.breaches[rule, kind] += 1
        log_event(_log, logging.ERROR, "pact breach", rule=rule, error=kind, message=error.message)

    def _load_draft_model(self) -> Any:
        """Load the draft model, if any; from now on the target returns the hidden states that it reads."""
        from graphpact_engine import models  # noqa: PLC0415  an extra that takes seconds to import

        path = self.config.speculative.draft_model
        if path is None:
            return None
        draft_model = models.load_draft_model(Path(path), target=self.model)
        self.model.hidden_states = draft_model.target_layers
        return draft_model

    def _read(self, request: Request) -> OutputText:
        """Return the text of a request, up to its newest token."""
        if request.text is None:
            sampling = request.sampling
            request.text = OutputText(
                self._decoder(),
                sampling.stop or (),
                prompt=request.prompt_token_ids,
                min_new_tokens=sampling.min_new_tokens or 0,
            )
        request.text.read(request.output_token_ids, finished=request.is_finished)
        return request.text

    def _complete(self, sampling: SamplingParams | None, prompt_len: int) -> SamplingParams:
        """Return the sampling parameters of a request: what they leave open is the checkpoint's."""
        if not isinstance(sampling, SamplingParams | None):
            raise RequestError(
                f"sampling must be SamplingParams; got {type(sampling).__name__}",
                hint="SamplingParams(max_new_tokens=64, temperature=0.8)",
            )
        completed = self._generation.complete(sampling or SamplingParams(), prompt_len)
        completed.require_served(self.vocab_size, self.eos_token_ids)
        if completed.stop:
            _ = self.tokenizer  # raises without one
        return completed

    def _decoder(self) -> Any:
        """Return the tokenizer, or None if the checkpoint has none."""
        try:
            return self.tokenizer
        except CheckpointError:
            return None


def _counted(batch: ForwardBatch) -> ForwardBatch:
    """Return the batch with the number of its tokens, all of which are real."""
    # The device writes the number itself: no copy from the host.
    count = torch.full((1,), batch.num_tokens, dtype=torch.int32, device=batch.device)
    return replace(batch, num_token_non_padded=count, num_token_non_padded_cpu=batch.num_tokens)


def _spec_of_draft(model: Any, dtype: torch.dtype, device: torch.device) -> ModelSpec:
    """Return the properties of a draft model: most of its batches carry the target's hidden states."""
    sizes = {
        **dict.fromkeys(ForwardMode, model.target_hidden_size),
        ForwardMode.DRAFT_DECODE: model.hidden_size,
    }
    return ModelSpec(model.layers, dtype, device, model.max_model_len, hidden_sizes=sizes)


def _sampling_of_each(sampling: Any, count: int) -> list[Any]:
    """Return the sampling parameters of each of ``count`` prompts; `Engine.add` checks their type."""
    if not isinstance(sampling, Sequence):
        return [sampling] * count
    if len(sampling) != count:
        raise RequestError(
            f"there are {count} prompts and {len(sampling)} sampling parameters",
            hint="give one for all prompts, or a list with one for each",
        )
    return list(sampling)
