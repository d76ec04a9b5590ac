"""`generate` of transformers as a way: with a growing or a static cache, plain or compiled by torch.compile.

Does not: use graphpact. Attention is transformers' own choice (SDPA).
"""

import os
import time
from typing import Any

import torch
import transformers
from torch._dynamo import config as dynamo_config

from graphpact_bench.timing import Tokens, Written
from graphpact_bench.ways.base import Way, WaySetting, intervals
from graphpact_bench.ways.engines import require_driver

_RECOMPILE_LIMIT = 64  # every batch size, and prompts beside decode steps


def load_model(setting: WaySetting) -> Any:
    """Return the model of transformers in the dtype and on the device of ``setting``."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    model = transformers.AutoModelForCausalLM.from_pretrained(setting.path, dtype=setting.torch_dtype)
    return model.to(setting.device).eval()


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers' types are partial
    """A stopping criterion that records the time of each token and never stops."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self.device = device

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=self.device)


class GenerateWay(Way):
    """``generate`` with its options as they are, except the cache and compilation.

    Args:
        name: Its name in the table.
        setting: What it is built for.
        cache: The ``cache_implementation``; None: transformers' default, which grows.
        is_compiled: Whether the forward pass of the model is compiled by torch.compile.
    """

    is_foreign = True

    def __init__(
        self, name: str, setting: WaySetting, *, cache: str | None = None, is_compiled: bool = False
    ) -> None:
        super().__init__(name)
        self.device = setting.device
        self.model = load_model(setting)
        self.options: dict[str, Any] = {} if cache is None else {"cache_implementation": cache}
        if is_compiled:
            self.model.forward = torch.compile(self.model.forward)

    def write(self, prompts: Tokens, count: int) -> Written:
        """Generate; a step ends when the stopping criteria are called."""
        clock, ids = _Clock(self.device), torch.tensor(prompts, device=self.device)
        start = time.perf_counter()
        with dynamo_config.patch(recompile_limit=_RECOMPILE_LIMIT):
            written = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                stopping_criteria=[clock],
                **self.options,
            )
        first, *steps = intervals([start, *clock.times])
        return Written(written[:, ids.shape[1] :].tolist(), first, steps)


def dynamic(name: str, setting: WaySetting) -> Way:
    """Return ``generate`` with its growing cache."""
    return GenerateWay(name, setting)


def static(name: str, setting: WaySetting) -> Way:
    """Return ``generate`` with a static cache."""
    return GenerateWay(name, setting, cache="static")


def growing_compiled(name: str, setting: WaySetting) -> Way:
    """Return ``generate`` with its growing cache, the forward pass compiled, without an engine.

    Raises:
        UnavailableWayError: There is no compiler.
    """
    _require_compiler(setting.device)
    return GenerateWay(name, setting, is_compiled=True)


def static_compiled(name: str, setting: WaySetting) -> Way:
    """Return ``generate`` with a static cache, the forward pass compiled.

    Raises:
        UnavailableWayError: There is no compiler.
    """
    _require_compiler(setting.device)
    return GenerateWay(name, setting, cache="static", is_compiled=True)


def _require_compiler(device: torch.device) -> None:
    """Raise `UnavailableWayError` where torch.compile cannot compile: on a CPU, where `cpu_graph` cannot."""
    if device.type == "cpu":
        require_driver("inductor", device)
