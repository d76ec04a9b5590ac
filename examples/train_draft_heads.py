"""Train the draft heads of tiny-llama: an EAGLE head and a multi-token prediction head on frozen KV.

A head guesses what the target model would generate, so it is trained on two kinds of text: the documents that
the target was trained on (see ``train_tiny_llama.py``), and text that the target itself continues from the
first bytes of such documents. The loss is the cross-entropy to the target's distribution, and for EAGLE the
distance to its hidden states. As in serving, a head reads the target's hidden states first and then its own:
each batch is run ``--unroll`` times, each time with the hidden states of the run before.

Then the script measures what the head is worth: it lets the target continue the prompts of ``prompts.txt``
greedily, drafts at each verification with the saved weights, and counts the tokens of a verification. Those
prompts are not used in training: no text that begins with one is generated for it.

Does not: change the target, or serve; the speculation plugin does.
A run is not reproducible bit for bit: the learning rate depends on the elapsed share of ``--minutes``.

Needs: graphpact with its engine, torch >= 2.9 (for ``torch.optim.Muon``).

    python examples/train_draft_heads.py eagle --minutes 12
    python examples/train_draft_heads.py mtp --minutes 12
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from train_tiny_llama import PAD_ID, VOCAB_SIZE, Corpus, Optimizers, collect_documents, rate, to_ids
from transformers import LlamaConfig, LlamaForCausalLM

from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.speculation import HIDDEN_STATES
from graphpact_engine.models import ATTENTION_NAME, DraftModel, TransformersModel, load_checkpoint
from graphpact_engine.models.draft_heads import (
    DraftHead,
    LlamaForCausalLMEagle,
    LlamaForCausalLMFrozenKvMtp,
)
from graphpact_engine.models.draft_model import load_draft_model
from graphpact_engine.models.interface import attending

HERE = Path(__file__).resolve().parent
KINDS: dict[str, type[DraftHead]] = {"eagle": LlamaForCausalLMEagle, "mtp": LlamaForCausalLMFrozenKvMtp}

# --------------------------------------------------------------------------------------- text


def read_prompts(path: Path) -> list[list[int]]:
    """Return the prompts of a file, one a line, as token ids; the space at the end of a line counts."""
    return [list(line.encode()) for line in path.read_text(encoding="utf-8").splitlines() if line]


@torch.no_grad()
def generate_texts(
    target: LlamaForCausalLM, documents: list[list[int]], excluded: list[list[int]], args: argparse.Namespace
) -> torch.Tensor:
    """Return ``[rows, length + 1]`` ids: beginnings of documents, continued by the target.

    Half of the rows are continued greedily, the others drawn at temperature 0.8. What follows the end of a
    text is padding.
    """
    rng = random.Random(args.seed)  # noqa: S311  (no secret)
    usable = [d for d in documents if not any(d[: len(p)] == p for p in excluded)]
    rows = []
    for batch in range(args.generated // 256):
        length = rng.randint(8, 64)
        starts = [d[:length] for d in rng.sample([d for d in usable if len(d) > length], 256)]
        prompts = torch.tensor(starts)
        rows.append(
            target.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_length=args.length + 1,
                do_sample=batch % 2 == 1,
                temperature=0.8 if batch % 2 else None,
                top_k=None,
            )
        )
        rows[-1] = functional.pad(rows[-1], (0, args.length + 1 - rows[-1].shape[1]), value=PAD_ID)
        print(f"generated {len(rows) * 256} texts", flush=True)
    return torch.cat(rows)


def windows(documents: list[list[int]], length: int) -> torch.Tensor:
    """Return ``[rows, length + 1]`` ids: the documents as one stream, cut."""
    stream = [id_ for ids in documents for id_ in ids]
    rows = len(stream) // (length + 1)
    return torch.tensor(stream[: rows * (length + 1)]).view(rows, length + 1)


def batches(texts: torch.Tensor, documents: torch.Tensor, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches without end: three quarters are texts of the target, one quarter documents."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        pick = [
            part[torch.randint(len(part), (count,), generator=generator)]
            for part, count in ((texts, rows - rows // 4), (documents, rows // 4))
        ]
        yield torch.cat(pick)


# ------------------------------------------------------------------------- attention in training


def spread(kv: torch.Tensor, heads: int) -> torch.Tensor:
    """Return ``[B, heads, L, dim]`` of keys or values ``[B, kv_heads, L, dim]``."""
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def delayed(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ``x`` ``[B, heads, L, dim]`` with row ``t`` at ``t + rows``; the first rows are zero."""
    return functional.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]]


@dataclass
class UnrolledAttention:
    """The attention of ``batch`` texts at once, in run ``step`` of several.

    Row ``t`` of a run stands for a draft whose last ``step`` tokens were drafted. So it sees the keys of run 0
    up to row ``t - step`` and, if the head has keys of its own, one key of each later run.

    Args:
        batch: Texts in the flat row of tokens.
        frozen: Keys and values ``[B, kv_heads, L, dim]`` of the target for a head without its own.
    """

    batch: int
    frozen: tuple[torch.Tensor, torch.Tensor] | None = None
    step: int = 0
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        asked: dict[str, Any],
    ) -> torch.Tensor:
        """See `graphpact_engine.models.interface.Attention`."""
        del module
        q = q.view(self.batch, -1, *q.shape[1:]).transpose(1, 2) * asked["scaling"]
        heads, length = q.shape[1:3]
        if k is not None and v is not None:
            self.kept.append(
                tuple(spread(t.view(self.batch, length, *t.shape[1:]).transpose(1, 2), heads) for t in (k, v))
            )
        elif not self.kept:
            self.kept.append(tuple(spread(t, heads) for t in self.frozen))
        keys, values = self.kept[0]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-self.step)
        scores = [(q @ keys.transpose(2, 3)).masked_fill(~seen, -1e30)]
        later = [
            tuple(delayed(t, self.step - i) for t in pair) for i, pair in enumerate(self.kept[1:], start=1)
        ]
        scores += [(q * own).sum(-1, keepdim=True) for own, _ in later]
        weights = torch.cat(scores, dim=-1).softmax(dim=-1)
        out = weights[..., :length] @ values
        for i, (_, own) in enumerate(later):
            out = out + weights[..., length + i : length + i + 1] * own
        return out.transpose(1, 2).reshape(self.batch * length, heads, -1)


# ----------------------------------------------------------------------------------- training


def build_head(kind: str, target: LlamaForCausalLM, intermediate_size: int) -> DraftHead:
    """Return an untrained head of the target's widths."""
    config = LlamaConfig.from_dict(target.config.to_dict() | {"architectures": None})
    config.num_hidden_layers = 1
    config.intermediate_size = intermediate_size
    config.max_position_embeddings = target.config.max_position_embeddings
    if kind == "mtp":
        config.target_kv_layer = target.config.num_hidden_layers - 1
    return KINDS[kind]._from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)


def loss_of(head: DraftHead, target: LlamaForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> Any:
    """Return the loss of a batch ``[B, L + 1]``, and the share of right guesses of each run.

    Row ``t`` reads token ``t + 1`` and hidden state ``t``, and guesses token ``t + 2``.
    """
    with torch.no_grad():
        given = target.model(ids, use_cache=True)
        states = given.last_hidden_state
        wanted = target.lm_head(states)[:, 1:].flatten(0, 1)
    embeds = target.model.embed_tokens(ids[:, 1:]).detach().flatten(0, 1)
    batch, length = ids.shape[0], ids.shape[1] - 1
    positions = torch.arange(length).repeat(batch)
    frozen = None
    if isinstance(head, LlamaForCausalLMFrozenKvMtp):  # a query has the position of its token
        positions = positions + 1
        cache = given.past_key_values.layers[head.config.target_kv_layer]
        frozen = cache.keys[:, :, :-1], cache.values[:, :, :-1]
    attention = UnrolledAttention(batch, frozen)
    probabilities = wanted.softmax(-1)
    best = wanted.argmax(-1)
    counts = (ids[:, 1:] != PAD_ID).flatten()
    hidden = states[:, :-1]
    row = torch.arange(length).repeat(batch)
    total, right = 0.0, []
    for step in range(args.unroll):
        attention.step = step
        seen = counts & (row >= step)
        with attending(attention):
            read = hidden.flatten(0, 1) * (not args.blind)
            to_head, out = head(embeds, read, positions)
        logits = target.lm_head(to_head)
        entropy = -(probabilities * logits.log_softmax(-1)).sum(-1)[seen].mean()
        if isinstance(head, LlamaForCausalLMEagle) and not args.blind:
            near = functional.smooth_l1_loss(out, states[:, 1:].flatten(0, 1), reduction="none")
            entropy = entropy + args.regression * near.mean(-1)[seen].mean()
        total = total + entropy * args.decay**step
        right.append((logits.argmax(-1) == best)[seen].float().mean())
        hidden = functional.pad(out.view(batch, length, -1), (0, 0, 1, 0))[:, :-1]
    return total, torch.stack(right).detach()


def train(args: argparse.Namespace) -> None:
    """Collect and generate text, train for the time budget, save, measure, and write the model card."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval().requires_grad_(False)
    prompts = read_prompts(args.prompts)
    corpus = Corpus([to_ids(document) for document in collect_documents(args.seed)])
    if args.texts and args.texts.exists():
        texts = torch.load(args.texts)
    else:
        texts = generate_texts(target, corpus.training, prompts, args)
        if args.texts:
            torch.save(texts, args.texts)
    documents = windows(corpus.training, args.length)

    head = build_head(args.kind, target, args.intermediate_size).train()
    optimizers = Optimizers(head, args.lr)
    begin = time.monotonic()
    steps, next_report, average = 0, 0.0, torch.zeros(args.unroll)
    for batch in batches(texts, documents, args.batch, args.seed):
        progress = (time.monotonic() - begin) / (60 * args.minutes)
        if progress >= 1.0:
            break
        loss, right = loss_of(head, target, batch, args)
        loss.backward()
        optimizers.step(rate(progress))
        steps += 1
        average = right if steps == 1 else 0.95 * average + 0.05 * right
        if progress >= next_report:
            shares = " ".join(f"{share:.3f}" for share in average.tolist())
            print(f"{progress * args.minutes:6.2f} min  step {steps:5d}  loss {loss:.3f}  right {shares}", flush=True)
            next_report += 0.05
    torch.save(head.state_dict(), f"/tmp/{args.kind}{'-blind' if args.blind else ''}.pt")


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("kind", choices=KINDS, help="the head to train")
    add("--target", type=Path, default=HERE / "models" / "tiny-llama", help="the target model")
    add("--output", type=Path, help="directory of the head; default: that of the target, with -KIND")
    add("--prompts", type=Path, default=HERE / "prompts.txt", help="prompts to measure with")
    add("--minutes", type=float, default=12.0, help="time budget, which sets the learning rate")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--seed", type=int, default=1, help="seed of the text and the first weights")
    add("--lr", type=float, default=0.02, help="Muon's peak learning rate (AdamW: a fifth)")
    add("--length", type=int, default=256, help="tokens of a text")
    add("--batch", type=int, default=16, help="texts in a step")
    add("--generated", type=int, default=4096, help="texts that the target generates")
    add("--texts", type=Path, help="file that keeps the generated texts for the next run")
    add("--intermediate-size", type=int, default=640, help="width of the feed-forward layer")
    add("--unroll", type=int, default=4, help="runs of each batch, on the hidden states of the run before")
    add("--decay", type=float, default=0.9, help="weight of each run, relative to the one before")
    add("--regression", type=float, default=0.5, help="weight of the distance of hidden states (EAGLE)")
    add("--blind", action="store_true", help="train a head that reads no hidden states, to compare")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
