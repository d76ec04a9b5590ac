"""llama.cpp for `serve`, by the package llama-cpp-python, on the same weights as a GGUF file.

Its low-level interface is used: a batch with one token of each sequence is one step. The token of each
sequence is the largest logit, found by numpy. Flash attention is off: on a CPU it computes in float16, which
changes tokens.

Does not: use llama.cpp's sampler and tokenizer.
"""

import ctypes
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("llama-cpp-python", "gguf")
_TYPES = {"float32": 0, "bfloat16": 30}  # of ggml: GGML_TYPE_F32, GGML_TYPE_BF16
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR_LEVEL = 4  # of ggml


def _tell_errors(level: int, line: bytes, _: Any) -> None:
    """Write errors of llama.cpp to stderr, and drop the rest of its log."""
    if level == _ERROR_LEVEL:
        sys.stderr.write(line.decode(errors="replace"))


_log = _LOG(_tell_errors)  # kept alive: llama.cpp calls it


class LlamaCppEngine:
    """A context of llama.cpp with one sequence for each request.

    Args:
        path: The checkpoint, in float32.
        dtype: float32 or bfloat16: the weights of the GGUF file, and the cache.
        requests: The most requests at a time.
        prompt: The most tokens of a prompt.
        new: The most tokens that are generated for a prompt.
        threads: Threads of its operators.

    Raises:
        RuntimeError: llama.cpp refused the file or the sizes; its reason is on stderr.
    """

    def __init__(self, path: str, dtype: str, requests: int, prompt: int, new: int, threads: int) -> None:
        import llama_cpp as lib  # noqa: PLC0415  of its own environment

        lib.llama_log_set(_log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        with tempfile.TemporaryDirectory(prefix="graphpact-bench-") as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(file, Path(path), dtype)
            parameters = lib.llama_model_default_params()
            parameters.n_gpu_layers = 0
            parameters.use_mmap = False  # the file is deleted, and weights are in memory as the others'
            model = lib.llama_model_load_from_file(str(file).encode(), parameters)
        if not model:
            raise RuntimeError("llama.cpp did not load the GGUF file")
        options = lib.llama_context_default_params()
        options.n_ctx = requests * (prompt + new)
        options.n_batch = options.n_ubatch = max(requests * prompt, requests)
        options.n_seq_max = requests
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = _TYPES[dtype]
        options.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.no_perf = True
        context = lib.llama_init_from_model(model, options)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        self.lib, self.context = lib, context
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(options.n_batch, 0, 1)

    def write(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        """Decode all prompts in one batch, and then one token of each sequence at a time."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)  # noqa: FBT003  C
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
        first, *steps = [end - start for start, end in pairwise(times)]
        return {"tokens": written, "first": first, "steps": steps}

    def _decode(self, tokens: list[tuple[int, int, int]]) -> list[int]:
        """Decode (token, position, sequence) triples, and return the best token after each sequence.

        Raises:
            RuntimeError: llama.cpp could not.
        """
        import numpy as np  # noqa: PLC0415  llama-cpp-python needs it

        batch, lib = self.batch, self.lib
        batch.n_tokens = len(tokens)
        last = {row: index for index, (_, _, row) in enumerate(tokens)}
        for index, (token, position, row) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = index == last[row]
        status = lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(lib.llama_get_logits(self.context), shape=(len(last), self.vocab))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best


def write_gguf(file: Path, checkpoint: Path, dtype: str) -> None:
    """Write the weights and sizes of a Llama of transformers to a GGUF file, without a tokenizer.

    Args:
        file: The file.
        checkpoint: The folder of ``save_pretrained``, in float32.
        dtype: The dtype of matrices in the file; norms are float32.
    """
    import gguf  # noqa: PLC0415  of its own environment

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    bfloat16 = gguf.GGMLQuantizationType.BF16
    for name, weight in read_weights(checkpoint).items():
        count = heads if "q_proj" in name else kv_heads if "k_proj" in name else None
        rows = weight if count is None else in_pairs(weight, count)
        if dtype == "bfloat16" and rows.ndim > 1:
            writer.add_tensor(gguf_name(name), gguf.quantize(rows, bfloat16), raw_dtype=bfloat16)
        else:
            writer.add_tensor(gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """Return the weights of the safetensors files of a checkpoint in float32, by name, as numpy's."""
    import numpy as np  # noqa: PLC0415  llama-cpp-python needs it

    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = np.fromfile(file, dtype=np.uint8)
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, each in header.items():
            if each["dtype"] != "F32":
                raise RuntimeError(f"{name} is {each['dtype']}, not float32")
            begin, end = each["data_offsets"]
            found[name] = content[start + begin : start + end].view(np.float32).reshape(each["shape"])
    return found


def gguf_name(name: str) -> str:
    """Return what GGUF calls the weight ``name`` of a Llama of transformers."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, *parts, kind = name.split(".")
    return f"blk.{layer}.{_OF_LAYERS['.'.join(parts)]}.{kind}"


def in_pairs(weight: Any, heads: int) -> Any:
    """Return the rows of a query or key weight so that the pairs of a rotation are neighbours.

    llama.cpp rotates neighbouring pairs of a head, transformers the two halves.

    Args:
        weight: ``[heads * head_dim, width]``; row ``i`` of a head rotates with row ``i + head_dim / 2``.
        heads: The heads of the weight.
    """
    import numpy as np  # noqa: PLC0415  llama-cpp-python needs it

    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.transpose(0, 2, 1, 3).reshape(rows, width))


ENGINE = LlamaCppEngine
