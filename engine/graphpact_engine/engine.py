"""`Engine`: prompts in, text out, every step through a lane.

    engine = Engine(EngineConfig.load(Path("engine.toml")))
    for completion in engine.generate(["Return a ", "The "]):
        print(completion.text)

Does not: serve a network, or run two steps at once.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact.shapes import GraphShape
from graphpact_engine.build import (
    OnCapture,
    backend_context,
    build_lane,
    build_observers,
    lay_out_memory,
    model_path,
    require_each_can_run,
)
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import CheckpointError, RequestError
from graphpact_engine.plans import (
    ModelSpec,
    check_backends,
    lane_without_latents,
    plan_lanes,
    require_observers,
    resolve_device,
    select_observers,
)
from graphpact_engine.request import FinishReason, Request, SamplingParams
from graphpact_engine.sampler import Sampler
from graphpact_engine.scheduler import Scheduler
from graphpact_engine.text import TextStream
from graphpact_engine.threads import choose_num_threads, running_on
from graphpact_engine.verify import Verifier

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt. ``text`` is empty if the checkpoint has no tokenizer.

    Args:
        index: Index of the prompt in the call.
        prompt: The prompt, as it was given.
        text: The generated text.
        token_ids: The generated tokens.
        finish_reason: Why it ended.
    """

    index: int
    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token of one prompt. ``text`` is empty while a character is incomplete.

    Args:
        index: Index of the prompt in the call.
        token_id: The token.
        text: The text that it completes.
        finish_reason: Why the request ended with this token; None if it goes on.
    """

    index: int
    token_id: int
    text: str
    finish_reason: FinishReason | None


class Engine:
    """A model, the lanes that run it, and the loop that feeds them.

    Args:
        config: The configuration.
        catalog: The plugins to select from; by default the installed ones.
        on_capture: Called after each captured shape.
        observers: Hook wrappers for every lane, the outermost first. They wrap the observers of the
            configuration; verification and the guard of a strict lane wrap them.

    Raises:
        UsageError: A name, value, checkpoint or model cannot be used; nothing was captured.
        CaptureError: Capturing a shape failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        catalog: PluginCatalog | None = None,
        on_capture: OnCapture | None = None,
        observers: Sequence[object] = (),
    ) -> None:
        self.config = config
        self.device = resolve_device(config.engine.device)
        catalog = catalog or PluginCatalog.scan()
        plans = plan_lanes(config, catalog, self.device)
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
        self.eos_token_ids = checkpoint.eos_token_ids
        spec = ModelSpec(
            self.model.layers,
            self.model.dtype,
            self.device,
            checkpoint.max_model_len,
            expanded_for=expanding if self.model.has_latents else None,
            expanded_layers=(lambda: models.TransformersModel(checkpoint.model).layers)
            if self.model.has_latents and expanding is None
            else None,
        )
        self.memory = lay_out_memory(config, spec)
        cache = self.memory.kv_cache
        contexts = [backend_context(plan, spec, self.memory, cache) for plan in plans]
        check_backends(plans, contexts, catalog, spec)
        self.lanes: list[Lane] = []
        self.verifiers: list[Verifier] = []
        self._lanes_of: dict[ForwardMode, list[Lane]] = {}
        for plan in plans:
            lane, verifier = build_lane(
                plan,
                config,
                model=self.model,
                spec=spec,
                memory=self.memory,
                observers=[*observers, *build_observers(configured)],
                on_capture=on_capture,
            )
            self.lanes.append(lane)
            self._lanes_of.setdefault(plan.mode, []).append(lane)
            if verifier is not None:
                self.verifiers.append(verifier)
        for lanes in self._lanes_of.values():
            require_each_can_run(lanes)
        weights = sum(weight.nbytes for _, weight in self.model.named_weights())
        self.num_threads = choose_num_threads(config.engine.num_threads, self.device, weights)
        with running_on(self.num_threads):
            for lane in self.lanes:
                lane.capture_all()
        self.scheduler = Scheduler(
            self.memory.requests,
            self.memory.pages,
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
            max_model_len=self.memory.limits.max_context_len,
            eos_token_ids=self.eos_token_ids,
            device=self.device,
        )
        self._sampler = Sampler()
        self._num_requests = 0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint, loaded on first access.

        Raises:
            CheckpointError: The checkpoint has no tokenizer, or a broken one.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def close(self) -> None:
        """Release the graphs of every lane. Later steps of the engine run eagerly."""
        for lane in self.lanes:
            lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- one request, one step -------------------------------------------------------------------

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Request:
        """Queue one prompt.

        A request without a seed uses ``engine.seed`` plus its number: equal prompts get different
        outputs, and a run can be repeated.

        Raises:
            RequestError: The prompt is empty, has a token id outside the vocabulary, or is too long for
                this engine; nothing was queued.
        """
        number = self._num_requests
        if prompt == "":  # some tokenizers turn it into a single begin token
            raise RequestError(
                f"request '{number}' has an empty prompt", hint="give at least one character"
            )
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"request '{number}' has token id {token}; the vocabulary of the model is 0 to"
                    f" {self.vocab_size - 1}",
                )
        request = Request(
            str(number),
            token_ids,
            sampling or SamplingParams(),
            default_seed=self.config.engine.seed + number,
        )
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def step(self) -> list[Request]:
        """Run one batch and return the requests that received a token."""
        scheduled = self.scheduler.schedule()
        if scheduled is None:
            return []
        with running_on(self.num_threads):
            logits = self.lane_of(scheduled.batch).run(scheduled.batch).logits
            rows = scheduled.sampled_indices
            if len(rows) < len(scheduled.requests):
                logits = logits[rows]
            sampled = iter(self._sampler.sample(logits, scheduled.sampled_requests))
        return self.scheduler.commit(
            scheduled, [next(sampled) if yields else None for yields in scheduled.samples]
        )

    def lane_of(self, batch: ForwardBatch) -> Lane:
        """Return the lane that runs ``batch``: the first lane of its mode with a shape that fits.

        If no shape fits, return the first lane of the mode, which runs the batch eagerly.
        """
        lanes = self._lanes_of[batch.forward_mode]
        if len(lanes) == 1:
            return lanes[0]
        return next((lane for lane in lanes if isinstance(lane.fit(batch), GraphShape)), lanes[0])

    # -- many prompts ----------------------------------------------------------------------------

    def stream(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Continue all prompts together and yield each token as it is generated.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        return self._stream(self._add_all(prompts, sampling))

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue all prompts together and return the completions in the prompts' order.

        Raises:
            RequestError: A prompt can never be served; no prompt was started.
        """
        texts = [""] * len(prompts)
        token_ids: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["abort"] * len(prompts)
        for delta in self.stream(prompts, sampling):
            texts[delta.index] += delta.text
            token_ids[delta.index].append(delta.token_id)
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
        return [
            Completion(i, prompt, texts[i], token_ids[i], reasons[i])
            for i, prompt in enumerate(prompts)
        ]

    # -- inside ----------------------------------------------------------------------------------

    def _add_all(self, prompts: Sequence[Prompt], sampling: SamplingParams | None) -> list[Request]:
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.add(prompt, sampling))  # noqa: PERF401  undone below
        except Exception as error:
            for request in requests:
                self.scheduler.abort(request.request_id)
            if isinstance(error, RequestError):
                which = f"prompt {len(requests) + 1} of {len(prompts)}"
                raise RequestError(f"{which}: {error.message}", hint=error.hint) from error
            raise
        return requests

    def _stream(self, requests: list[Request]) -> Iterator[Delta]:
        index_of = {id(request): i for i, request in enumerate(requests)}
        texts = [TextStream(self._decoder()) for _ in requests]
        try:
            while any(not request.is_finished for request in requests):
                for request in self.step():
                    index = index_of.get(id(request))
                    if index is None:
                        continue  # not of this call: queued with add()
                    token = request.output_token_ids[-1]
                    text = texts[index].push(token, last=request.is_finished)
                    yield Delta(index, token, text, request.finish_reason)
        finally:  # the caller may stop iterating early
            for request in requests:
                self.scheduler.abort(request.request_id)

    def _decoder(self) -> Any:
        """Return the tokenizer, or None if the checkpoint has none."""
        try:
            return self.tokenizer
        except CheckpointError:
            return None
