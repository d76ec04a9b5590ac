"""Train a tiny byte-level Llama on the documentation strings of Python's standard library.

The script reads the standard library of the Python that runs it (nothing is downloaded), builds
a tokenizer whose 256 byte tokens have ids equal to the byte values, trains a
``LlamaForCausalLM`` of about 1.9 million parameters from scratch on the CPU, and writes a model
directory that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained``
load: config, generation config, bfloat16 safetensors, tokenizer files and a model card.

Does not: make a useful assistant. The model is trained on less than two megabytes of text. It continues
a prompt in the style of Python's documentation, in mostly readable sentences that are often wrong.
A run is not reproducible bit for bit: the seed fixes the data, the split and the initial weights, but the
learning rate depends on the elapsed share of ``--minutes``, so a faster machine takes more steps.

Needs: torch >= 2.9 (for ``torch.optim.Muon``), transformers, tokenizers, safetensors.

    python examples/train_tiny_llama.py --minutes 55 --threads 2 --autocast --compile
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import platform
import random
import re
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TEXT_ID = 256
PAD_ID = 257
VOCAB_SIZE = 258

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
LONGEST_DOCUMENT = 1500
SHORTEST_DOCUMENT = 24

# --------------------------------------------------------------------------------------- text

ASCII_PUNCTUATION = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "\t": "    ",
    }
)
ROLE = re.compile(r":[a-z][a-z:]*:`[~!]?([^`<]*?)\s*(?:<[^`>]*>)?`")
RULE = re.compile(r"^\W*$")
BULLET = re.compile(r"^([-*+o]|\(?\w{1,2}[.)]) ")
CODE_LINE = re.compile(
    r"^\s*(>>>|\.\.\. |\.\. |[|+$#%@]|[-\w]+ *::?=|"
    r"(def|class|import|from \S+ import|for|while|with|elif|print|try|else|except)\b.*[:)]$)"
)
PROSE_CHARACTERS = re.compile(r"[A-Za-z ,.;'\n-]")


def module_strings(path: Path) -> Iterator[str]:
    """Yield the documentation strings of one module (all long strings of ``pydoc_data``)."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented):
            text = ast.get_docstring(node, clean=True)
            if text:
                yield text
        elif path.parent.name == "pydoc_data" and isinstance(node, ast.Constant):
            text = node.value if isinstance(node.value, str) else ""
            if len(text) > 200:
                yield inspect.cleandoc(text)


def reflow(paragraph: str) -> str:
    """Join wrapped lines with a space; keep line breaks before list items and after short lines."""
    out = ""
    last_length = 0
    for raw in paragraph.split("\n"):
        line = raw.strip()
        if RULE.match(line):  # the underline of a heading
            continue
        line = re.sub(r" {2,}", " ", line)
        if not out:
            out = line
        elif last_length < 50 or BULLET.match(line):
            out += "\n" + line
        else:
            out += " " + line
        last_length = len(raw)
    return out


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is prose, not a table, grammar rule, doctest or source code."""
    if any(CODE_LINE.match(line) for line in paragraph.split("\n")):
        return False
    if len(re.findall(r"[A-Za-z]{2,}", paragraph)) < 3:
        return False
    return len(PROSE_CHARACTERS.findall(paragraph)) >= 0.91 * len(paragraph)


def clean(text: str) -> list[str]:
    """Return the prose of one documentation string as documents of limited length."""
    text = ROLE.sub(r"`\1`", text.translate(ASCII_PUNCTUATION))
    if not all(" " <= c <= "~" or c == "\n" for c in text):
        return []
    documents: list[str] = []
    current = ""
    for block in re.split(r"\n\s*\n", text):
        paragraph = reflow(block) if is_prose(block) else ""
        if not paragraph:
            continue
        if current and len(current) + len(paragraph) > LONGEST_DOCUMENT:
            documents.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
    documents.append(current)
    return [document for document in documents if len(document) >= SHORTEST_DOCUMENT]


def collect_documents(seed: int) -> list[str]:
    """Return the distinct documents of the standard library, shuffled by ``seed``."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            for text in module_strings(path):
                found.update(dict.fromkeys(clean(text)))
    documents = list(found)
    random.Random(seed).shuffle(documents)  # noqa: S311  (no secret)
    return documents


# ---------------------------------------------------------------------------------- tokenizer


def byte_symbols() -> list[str]:
    """Return the visible character of each byte in byte-level tokenizers."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols: list[str] = []
    hidden = 0
    for byte in range(256):
        if byte in visible:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + hidden))
            hidden += 1
    return symbols


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer without merges: token id = byte value."""
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    if (tokenizer.eos_token_id, tokenizer.pad_token_id) != (END_OF_TEXT_ID, PAD_ID):
        raise RuntimeError("the special tokens did not get the ids 256 and 257")
    for sample in ("Return a list.\n", "  two  spaces , don't ", "naïve café 日本 🦙\r\n\t\x00"):
        ids = tokenizer.encode(sample)
        if ids != list(sample.encode()) or tokenizer.decode(ids) != sample:
            raise RuntimeError(f"the tokenizer does not round-trip {sample!r}")
    return tokenizer


# --------------------------------------------------------------------------------------- data


def to_ids(document: str) -> list[int]:
    """Return the tokens of one document, followed by the end-of-text token."""
    return [*document.encode(), END_OF_TEXT_ID]


def batches(
    documents: list[list[int]], batch_tokens: int, length: list[int], rng: random.Random
) -> Iterator[torch.Tensor]:
    """Yield batches of ``length[0] + 1`` ids without end, shuffling the documents in each epoch.

    About half of the windows start at the start of a document, without a token before it, so that
    a prompt needs no begin token. The others start at the end of the previous window. The caller
    may change ``length[0]`` between batches.
    """
    while True:
        order = documents[:]
        rng.shuffle(order)
        stream: list[int] = []
        starts: list[int] = []
        for ids in order:
            starts.append(len(stream))
            stream.extend(ids)
        windows: list[list[int]] = []
        at = next_start = 0
        size = length[0] + 1
        rows = batch_tokens // length[0]
        while at + size <= len(stream):
            if rng.random() < 0.5:
                while next_start < len(starts) and starts[next_start] < at:
                    next_start += 1
                if next_start < len(starts) and starts[next_start] - at < size:
                    at = starts[next_start]
            window = stream[at : at + size]
            if len(window) == size:
                windows.append(window)
            at += size - 1
        rng.shuffle(windows)
        for first in range(0, len(windows) - rows + 1, rows):
            yield torch.tensor(windows[first : first + rows])
            if length[0] + 1 != size:
                break


@torch.no_grad()
def bits_per_byte(model: nn.Module, documents: list[list[int]], length: int = 512) -> float:
    """Return the loss on held-out documents, end-of-text tokens included, in bits per byte.

    The documents are read as one stream in windows of ``length`` that do not overlap.
    """
    stream = [id_ for ids in documents for id_ in ids]
    rows = (len(stream) - 1) // length
    if rows < 1:
        raise ValueError("too little held-out text")
    inputs = torch.tensor(stream[: rows * length]).view(rows, length)
    targets = torch.tensor(stream[1 : rows * length + 1]).view(rows, length)
    was_training = model.training
    model.eval()
    total = 0.0
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        logits = model(input_ids=x, use_cache=False).logits.float()
        total += functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train(was_training)
    return total / (rows * length) / math.log(2)


# ----------------------------------------------------------------------------------- training


def build_model(dropout: float) -> LlamaForCausalLM:
    """Return the untrained model; in training, dropout applies to the output of each block."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=480,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    if dropout > 0:

        def drop(module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
            return functional.dropout(output, dropout, module.training)

        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
            layer.mlp.down_proj.register_forward_hook(drop)
    return model


def rate(progress: float, warm_up: float = 0.01) -> float:
    """Return the factor of the learning rate: linear warm-up, then linear decay to zero."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    return max(1.0 - (progress - warm_up) / (1.0 - warm_up), 0.0)


class Optimizers:
    """Two optimizers: Muon for the layer matrices, AdamW at a fifth of its rate for other weights."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        named = dict(model.named_parameters())
        matrices = {n: p for n, p in named.items() if p.ndim == 2 and "layers" in n}
        others = [p for n, p in named.items() if n not in matrices]
        self.parameters = list(named.values())
        self.members: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices.values(), weight_decay=0.05), lr),
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), lr / 5),
        ]

    def step(self, factor: float) -> None:
        """Update the weights with ``factor`` times the peak rates, and clear the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak in self.members:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@dataclass
class Corpus:
    """Encoded documents, the first 4 % of which are held out."""

    documents: list[list[int]]

    def __post_init__(self) -> None:
        cut = len(self.documents) // 25
        self.held_out = self.documents[:cut]
        self.training = self.documents[cut:]
        self.held_out_bytes = sum(map(len, self.held_out))
        self.train_bytes = sum(map(len, self.training))


@dataclass
class Result:
    """The results of a run, for the model card."""

    steps: int
    tokens: int
    minutes: float
    loss: float


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> LlamaForCausalLM:
    """Write a bfloat16 copy of the model and the tokenizer; return the copy loaded from the files."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=PAD_ID
    )
    copy.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"  # use the class name of older releases
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), encoding="utf-8")
    (folder / "model.safetensors").chmod(0o644)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train(args: argparse.Namespace) -> None:
    """Collect the text, train for the time budget, and write the model directory."""
    begin = time.monotonic()
    budget = 60 * args.minutes
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()

    corpus = Corpus([to_ids(document) for document in collect_documents(args.seed)])
    print(
        f"{len(corpus.documents)} documents, {corpus.train_bytes} bytes to train on, "
        f"{corpus.held_out_bytes} held out"
    )

    model = build_model(args.dropout)
    optimizers = Optimizers(model, args.lr)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    if args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)

    model.train()
    length = [args.length]
    steps = tokens = 0
    average = math.nan
    next_report = 0.0
    next_save = 60 * args.save_minutes
    rng = random.Random(args.seed)  # noqa: S311  (no secret)
    for batch in batches(corpus.training, args.batch_tokens, length, rng):
        elapsed = time.monotonic() - begin
        progress = elapsed / budget
        if progress >= 1.0:
            break
        if progress >= 1.0 - args.long_share:
            length[0] = 2 * args.length
        loss = loss_of(batch)
        loss.backward()
        optimizers.step(rate(progress))
        steps += 1
        tokens += batch.shape[0] * (batch.shape[1] - 1)
        value = loss.item() / math.log(2)
        average = value if math.isnan(average) else 0.98 * average + 0.02 * value
        if elapsed >= next_report:
            print(
                f"{elapsed / 60:6.2f} min  step {steps:6d}  "
                f"epoch {tokens / corpus.train_bytes:5.1f}  train {average:.3f}  "
                f"held out {bits_per_byte(model, corpus.held_out, length[0]):.3f} bits/byte",
                flush=True,
            )
            next_report = elapsed + 60 * args.report_minutes
        if args.checkpoints and elapsed >= next_save:
            save(model, tokenizer, args.checkpoints / f"minute-{elapsed / 60:02.0f}")
            next_save = elapsed + 60 * args.save_minutes

    saved = save(model, tokenizer, args.output)
    minutes = (time.monotonic() - begin) / 60
    result = Result(steps, tokens, minutes, bits_per_byte(saved, corpus.held_out))
    write_card(args, corpus, saved, result)
    print(f"held out, as saved: {result.loss:.3f} bits/byte; wrote {args.output}")


def write_card(args: argparse.Namespace, corpus: Corpus, model: LlamaForCausalLM, result: Result) -> None:
    """Write the model card beside the weights."""
    parameters = sum(p.numel() for p in model.parameters())
    options = f"--minutes {args.minutes:g} --threads {args.threads} --dropout {args.dropout:g}"
    options += " --autocast" * args.autocast + " --compile" * args.compile
    size = (args.output / "model.safetensors").stat().st_size
    card = f"""\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny-llama

A Llama-architecture language model small enough to live in a repository: {parameters:,}
parameters, {size:,} bytes of bfloat16 weights. It continues a prompt with English in the style
of Python's documentation strings. It is meant for examples, tests and demonstrations of software
that runs language models; what it writes is often wrong, and nothing should rely on it.

- **Architecture**: `LlamaForCausalLM`, 5 layers, hidden size 192, 6 attention heads sharing 2
  key/value heads of size 32, feed-forward size 480, tied embeddings.
- **Tokens**: bytes. Token ids 0 to 255 are the UTF-8 bytes of the text, `{END_OF_TEXT}` (256)
  ends a document, `{PAD}` (257) pads. Nothing is put before a prompt.
- **Context**: trained on sequences of {args.length} and {2 * args.length} bytes. Positions up to
  1024 are allowed, but the model has not seen those after {2 * args.length}.
- **Data**: the prose of the documentation strings in the standard library of CPython
  {platform.python_version()}, the language reference in `pydoc_data` included; paragraphs
  re-joined, code and tables left out. {len(corpus.documents):,} documents: {corpus.train_bytes:,}
  bytes to train on, {corpus.held_out_bytes:,} held out.
- **Held-out loss**: {result.loss:.3f} bits per byte, in windows of 512, measured with the saved
  bfloat16 weights computed in float32.
- **Training**: {result.steps:,} steps, {result.tokens:,} tokens
  ({result.tokens / corpus.train_bytes:.1f} passes over the data), {result.minutes:.0f} minutes on
  {args.threads} CPU threads; Muon for the matrices of the layers, AdamW for the rest.

## Retrain

    python examples/train_tiny_llama.py {options}

The result differs from run to run: the learning rate follows the clock, and a faster or less busy
machine takes more steps in the same time.

## Licence

The weights are under the Apache License 2.0. The text they were trained on is from CPython's
documentation strings, copyright Python Software Foundation and others, under the PSF License.
"""
    (args.output / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Read the options and train."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--output", type=Path, default=here / "models" / "tiny-llama", help="model directory")
    add("--minutes", type=float, default=55.0, help="time budget, which sets the learning rate")
    add("--threads", type=int, default=2, help="CPU threads")
    add("--seed", type=int, default=1, help="seed of the data order, split and first weights")
    add("--lr", type=float, default=0.02, help="Muon's peak learning rate (AdamW: a fifth)")
    add("--dropout", type=float, default=0.1, help="dropout on the output of each block")
    add("--length", type=int, default=256, help="sequence length; doubled near the end")
    add("--long-share", type=float, default=0.3, help="share of the time at double length")
    add("--batch-tokens", type=int, default=4096, help="tokens in a step")
    add("--autocast", action="store_true", help="bfloat16 matrix products (weights stay float32)")
    add("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    add("--report-minutes", type=float, default=2.0, help="minutes between reports")
    add("--checkpoints", type=Path, help="folder for models saved during training")
    add("--save-minutes", type=float, default=8.0, help="minutes between saved models")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
