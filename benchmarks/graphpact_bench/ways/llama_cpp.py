"""llama.cpp as a way, by the package llama-cpp-python, on the same weights as a GGUF file.

Its low-level interface is used: a batch with one token of each sequence is one step. The token of each
sequence is the largest logit, found by numpy.

Does not: use graphpact, or llama.cpp's sampler and tokenizer.
"""

import ctypes
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from graphpact_bench.timing import Tokens, UnavailableWayError, Written
from graphpact_bench.ways.base import Way, WaySetting, differences
from graphpact_bench.ways.generate import load_model
from graphpact_bench.ways.gguf_file import write_gguf

_TYPES = {"float32": 0, "bfloat16": 30}  # of ggml: GGML_TYPE_F32, GGML_TYPE_BF16


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_drop = _LOG(lambda *_: None)  # kept alive: llama.cpp calls it with each line of its log


class LlamaCppWay(Way):
    """A context of llama.cpp with one sequence for each request.

    Args:
        name: Its name in the table.
        setting: What it is built for.
    """

    is_foreign = True

    def __init__(self, name: str, setting: WaySetting) -> None:
        super().__init__(name)
        self._lib = lib = _library()
        largest, self.vocab = max(setting.batch_sizes), setting.shape.vocab
        with tempfile.TemporaryDirectory(prefix="graphpact-bench-") as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(file, load_model(setting), setting)
            parameters = lib.llama_model_default_params()
            parameters.n_gpu_layers = 0
            parameters.use_mmap = False  # the file is deleted, and weights are in memory as the others'
            self._model = lib.llama_model_load_from_file(str(file).encode(), parameters)
        if not self._model:
            raise UnavailableWayError("llama.cpp did not load the GGUF file")
        options = lib.llama_context_default_params()
        options.n_ctx = largest * (setting.max_tokens + 1)
        options.n_batch = options.n_ubatch = max(largest * setting.prompt, largest)
        options.n_seq_max = largest
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = _TYPES[setting.dtype]
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # on a CPU it computes in float16
        options.no_perf = True
        self._context = lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise UnavailableWayError("llama.cpp made no context")
        self._batch = lib.llama_batch_init(options.n_batch, 0, 1)

    def write(self, prompts: Tokens, count: int) -> Written:
        """Decode all prompts in one batch, and then one token of each sequence at a time."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)  # noqa: FBT003  C
        times = [time.perf_counter()]
        newest = self._decode(
            [(token, at, row) for row, ids in enumerate(prompts) for at, token in enumerate(ids)]
        )
        times.append(time.perf_counter())
        written = [[token] for token in newest]
        for step in range(count - 1):
            pairs = enumerate(zip(newest, prompts, strict=True))
            newest = self._decode([(token, len(ids) + step, row) for row, (token, ids) in pairs])
            times.append(time.perf_counter())
            for tokens, token in zip(written, newest, strict=True):
                tokens.append(token)
        first, *steps = differences(times)
        return Written(written, first, steps)

    def _decode(self, tokens: list[tuple[int, int, int]]) -> list[int]:
        """Decode (token, position, sequence) triples, and return the best token after each sequence."""
        import numpy as np  # noqa: PLC0415  llama-cpp-python needs it

        batch, lib = self._batch, self._lib
        batch.n_tokens = len(tokens)
        last = {row: index for index, (_, _, row) in enumerate(tokens)}
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = index == last[row]
        status = lib.llama_decode(self._context, batch)
        if status:
            raise UnavailableWayError(f"llama.cpp: llama_decode returned {status}")
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self._context), shape=(len(last), self.vocab))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best

    def close(self) -> None:
        """Release batch, context and model."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def _library() -> Any:
    """Return the bindings of llama.cpp, whose log is dropped.

    Raises:
        UnavailableWayError: A package is missing.
    """
    for package in ("llama_cpp", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise UnavailableWayError(f'{package} is not installed; pip install "graphpact-bench[llama]"')
    import llama_cpp  # noqa: PLC0415  an extra

    llama_cpp.llama_log_set(_drop, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def llama_cpp(name: str, setting: WaySetting) -> Way:
    """Return llama.cpp.

    Raises:
        UnavailableWayError: A package is missing, the device is not a CPU, or it refuses the model.
    """
    if setting.device.type != "cpu":
        raise UnavailableWayError("it is compared on a CPU only")
    return LlamaCppWay(name, setting)
