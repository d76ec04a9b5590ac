"""`Engine`: prompts in, text out, every step through a lane.

    engine = Engine(EngineConfig.load(Path("engine.toml")))
    for completion in engine.generate(["Return a ", "The "]):
        print(completion.text)

Does not: serve a network, or run two steps at once.
"""

import logging
import reprlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from graphpact.batch import ForwardBatch
from graphpact.errors import ContractError, EngineError, UsageError
from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact_engine.build import build_parts
from graphpact_engine.build_lanes import OnCapture
from graphpact_engine.config import EngineConfig
from graphpact_engine.deltas import DeltaStream
from graphpact_engine.errors import RequestError
from graphpact_engine.faults import names_plugins
from graphpact_engine.logs import log_event
from graphpact_engine.prompts import Prompt, encode, list_prompts, require_tokens
from graphpact_engine.ranks.outputs import gathered
from graphpact_engine.ranks.processes import connect, explaining, local_device
from graphpact_engine.request import FinishReason, Request, SamplingParams
from graphpact_engine.selection import resolve_device

_log = logging.getLogger(__name__)

Sampling: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""The sampling parameters of all prompts, or one for each prompt; None for the defaults."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    Args:
        index: Index of the prompt in the call.
        prompt: The prompt, as it was given.
        text: The generated text, up to a stop string; empty if the checkpoint has no tokenizer.
        token_ids: The generated tokens, including the one that completed a stop string.
        finish_reason: Why it ended.
    """

    index: int
    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


class Engine:
    """A model, the lanes that run it, and the loop that feeds them.

    Args:
        config: The configuration.
        catalog: The plugins to select from; by default the installed ones.
        on_capture: Called after each captured shape.
        observers: Hook wrappers for every lane, the outermost first. They wrap the observers of the
            configuration; verification and the strict observer of a strict lane wrap them.

    Attributes:
        lanes: Every `graphpact.Lane`, with its ``name``, ``stats``, ``runner``, ``backend`` and ``driver``.
        is_async: Whether decode steps are launched before the tokens of the step before are read.
        ranks: The ranks that run the engine together; None for one process.
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
        device = local_device(resolve_device(config.engine.device))
        self.ranks = connect(config, device)
        with explaining(self.ranks):
            parts = build_parts(
                config,
                catalog or PluginCatalog.scan(),
                on_capture,
                observers,
                device=device,
                ranks=self.ranks,
            )
        self.config = config
        self.device = parts.device
        self.is_async = parts.is_async
        self.model = parts.models.target
        self.draft_model = parts.models.draft
        self.vocab_size = parts.models.vocab_size
        self.eos_token_ids = parts.models.generation.eos_token_ids
        self.memory = parts.memory
        self.lanes = parts.lanes
        self.verifiers = parts.verifiers
        self.speculation = parts.speculation
        self.num_threads = parts.num_threads
        self.scheduler = parts.scheduler
        self.breaches: Counter[tuple[str, str]] = Counter()
        self._generation = parts.models.generation
        self._texts = parts.models.texts
        self._lanes = parts.lane_set
        self._loop = parts.loop
        self._rank_steps = parts.rank_steps
        self._run_step = parts.phases.observed("step", parts.loop.step)
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
        return self._texts.tokenizer

    @property
    def recommended_sampling(self) -> Mapping[str, float]:
        """The temperature, top_p, top_k and min_p that the checkpoint recommends; empty for greedy.

        They are not applied automatically: ``SamplingParams(**engine.recommended_sampling)``.
        """
        return self._generation.recommended

    @names_plugins
    def close(self) -> None:
        """Release the graphs of every lane. Later steps of the engine run eagerly.

        The processes stay connected: another engine may follow.

        Raises:
            EngineError: A driver failed to release a graph; every other graph was released.
        """
        self._lanes.close()

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
            error.add_note(f"and then: {fault}")  # the first error is the cause

    # -- one request, one step -------------------------------------------------------------------

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Request:
        """Queue one prompt.

        A request without a seed uses ``engine.seed`` plus its number: equal prompts get different
        outputs, and a run can be repeated. On several ranks, all ranks of an attention group have to add the
        same requests, and every rank of a replica has to call `step` as often as the others.

        Raises:
            RequestError: The prompt has a wrong type, is empty or is too long for this engine; or the prompt
                or the sampling parameters contain a token id outside the vocabulary. Nothing was queued.
            CheckpointError: Text or stop strings need a tokenizer, and the checkpoint has none.
        """
        request = self._request_of(prompt, sampling, number=self._num_requests)
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    @names_plugins
    def step(self) -> list[Request]:
        """Run one batch and return the requests that received a token.

        If the model fails, no request changes, and the next call repeats the step. With asynchronous
        scheduling a call also launches the step after the one whose tokens it returns, if possible.

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
            with explaining(self.ranks):
                return self._run_step()
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
            Whether the request was alive. A request that has ended or belongs to another engine is not
            changed.

        Raises:
            RequestError: ``request`` is neither a request nor an id.
        """
        if not isinstance(request, Request | str):
            raise RequestError(
                f"cannot abort {reprlib.repr(request)}: it is not a request",
                hint="give what `Engine.add` returned, or its request_id",
            )
        if self._is_stepping:  # garbage collection may close a stream at any time
            self._to_abort.append(request)
            return self.scheduler.is_alive(request)
        return self.scheduler.abort(request)

    def text_of(self, request: Request) -> str:
        """Return the text that a request has generated so far, as far as it may be shown.

        The text excludes an incomplete character at the end, and an end that may begin a stop string.
        """
        return "".join(self._texts.read(request).pieces)

    @names_plugins
    def lane_of(self, batch: ForwardBatch) -> Lane:
        """Return the lane that runs a decode, extend or mixed ``batch`` of the target model.

        It is the first lane of its mode with a shape that fits. If none fits, it is the first lane of the
        mode, which runs the batch eagerly.
        """
        return self._lanes.choose_target(batch)

    # -- many prompts ----------------------------------------------------------------------------

    def stream(self, prompts: Iterable[Prompt], sampling: Sampling = None) -> DeltaStream:
        """Continue all prompts together and return an iterator of their tokens, as they are generated.

        On several ranks, all ranks have to make the same call. Each gets the tokens of the prompts that its
        attention group serves, prompt ``i`` of ``n`` groups the group ``i % n``. The iteration ends when all
        ranks are done.

        The prompts are queued at once. Several streams may take turns, and generate together: each gets
        its own tokens. Closing a stream, or dropping it, aborts its requests.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        listed = list_prompts(prompts)
        each = _sampling_of_each(sampling, len(listed))
        requests: list[Request] = []
        for prompt, its_sampling in zip(listed, each, strict=True):
            try:
                request = self._request_of(prompt, its_sampling, number=self._num_requests + len(requests))
                self.scheduler.require_servable(request)
            except RequestError as error:
                which = f"prompt {len(requests) + 1} of {len(listed)}"
                raise RequestError(f"{which}: {error.message}", hint=error.hint) from error
            requests.append(request)
        self._num_requests += len(requests)
        own = [i for i in range(len(requests)) if self.ranks is None or self.ranks.serves(i)]
        for i in own:
            self.scheduler.add(requests[i])
        return DeltaStream(
            [requests[i] for i in own],
            step=self.step,
            read=self._texts.read,
            abort=self.abort,
            indices=own,
            finish=self._finish_together,
        )

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling = None) -> list[Completion]:
        """Continue all prompts together and return the completions in the prompts' order, on every rank.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        listed = list_prompts(prompts)
        with self.stream(listed, sampling) as stream:
            for _ in stream:
                pass
        completions = [
            Completion(
                i,
                listed[i],
                self.text_of(request),
                list(request.output_token_ids),
                request.finish_reason or "abort",
            )
            for i, request in zip(stream.indices, stream.requests, strict=True)
        ]
        return completions if self.ranks is None else gathered(self.ranks, completions)

    # -- inside ----------------------------------------------------------------------------------

    def _finish_together(self) -> None:
        """Take steps until no rank has requests."""
        while self._rank_steps is not None:
            self.step()
            if self._rank_steps.is_done:
                return

    def _request_of(self, prompt: Prompt, sampling: SamplingParams | None, *, number: int) -> Request:
        """Return the request of a prompt; see `add` for the errors."""
        token_ids = encode(prompt, lambda: self.tokenizer)
        require_tokens(token_ids, self.vocab_size, "the prompt has")
        return Request(
            str(number),
            token_ids,
            self._complete(sampling, len(token_ids)),
            default_seed=self.config.engine.seed + number,
        )

    def _tell_breach(self, error: ContractError) -> None:
        """Count and log an error of the contract, which ended a step."""
        rule, kind = error.rule or "", type(error).__name__
        self.breaches[rule, kind] += 1
        log_event(_log, logging.ERROR, "pact breach", rule=rule, error=kind, message=error.message)

    def _complete(self, sampling: SamplingParams | None, prompt_len: int) -> SamplingParams:
        """Return the sampling parameters of a request, with the checkpoint's values where they are None."""
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
