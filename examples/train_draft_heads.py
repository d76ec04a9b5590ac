"""Train the draft heads of tiny-llama: an EAGLE head and a multi-token prediction head on frozen KV.

A head guesses what the target model would generate, so it is trained on two kinds of text: the documents that
the target was trained on (see ``train_tiny_llama.py``), and text that the target itself continues from the
first bytes of such documents. The loss is the cross-entropy to the target's distribution, and for EAGLE the
distance to its hidden states. As in serving, a head reads the target's hidden states first and then its own:
each batch is run ``--unroll`` times, each time with the hidden states of the run before.

Then the script measures the acceptance of the head. The target continues the prompts of ``prompts.txt``
greedily, and the saved weights draft for each verification; the script counts the tokens of a verification.
Those prompts are not used in training: no text that begins with one of them is generated for it.

Does not: change the target, or serve; the speculation plugin does.
A run is not reproducible bit for bit: the learning rate depends on the elapsed share of ``--minutes``.

Needs: graphpact with its engine, torch >= 2.9 (for ``torch.optim.Muon``).

    python examples/train_draft_heads.py eagle --minutes 12
    python examples/train_draft_heads.py mtp --minutes 12
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from train_tiny_llama import PAD_ID, Corpus, Optimizers, collect_documents, rate, to_ids
from transformers import LlamaConfig, LlamaForCausalLM

from graphpact.attention import LayerSpec
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.speculation import HIDDEN_STATES
from graphpact_engine.models import (
    ATTENTION_NAME,
    DraftModel,
    TransformersModel,
    load_checkpoint,
    load_draft_model,
)
from graphpact_engine.models.draft_heads import (
    DraftHead,
    LlamaForCausalLMEagle,
    LlamaForCausalLMFrozenKvMtp,
)
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

    Half of the rows are continued greedily, the others are drawn at temperature 0.8. The tokens after the end
    of a text are padding.
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
    """Return ``[rows, length + 1]`` ids: the documents as one stream, cut into rows."""
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

    Row ``t`` of a run stands for a draft whose last ``step`` tokens were drafted. So it sees the keys of run
    0 up to row ``t - step`` and, if the head has its own keys, one key of each later run.

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


@dataclass
class Result:
    """The results of a run, for the model card."""

    steps: int
    texts: int
    prompts: int
    acceptance: Acceptance


def build_head(kind: str, target: LlamaForCausalLM, intermediate_size: int) -> DraftHead:
    """Return an untrained head of the target's widths."""
    changes: dict[str, Any] = {
        "architectures": [KINDS[kind].__name__],
        "num_hidden_layers": 1,
        "intermediate_size": intermediate_size,
        "attn_implementation": ATTENTION_NAME,
        "tie_word_embeddings": False,  # it has no embedding to tie: SGLang gives it the target's two
    }
    if kind == "mtp":
        changes["target_kv_layer"] = target.config.num_hidden_layers - 1
    # SGLang's head has this bias, and draws it if the checkpoint has none.
    own = {"fc.bias"} if kind == "eagle" else set()
    return KINDS[kind](LlamaConfig.from_dict(target.config.to_dict() | changes), own)


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
    if isinstance(head, LlamaForCausalLMFrozenKvMtp):  # a query has its token's position
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
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    target.requires_grad_(requires_grad=False)
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
            print(
                f"{progress * args.minutes:6.2f} min  step {steps:5d}  loss {loss:.3f}  right {shares}",
                flush=True,
            )
            next_report += 0.05
    output = args.output or args.target.with_name(f"{args.target.name}-{args.kind}")
    if args.blind:
        output = output.with_name(f"{output.name}-blind")
    save(head, output)
    acceptance = measure(args, target, output)
    write_card(args, head, output, Result(steps, len(texts), len(prompts), acceptance))


def save(head: DraftHead, folder: Path) -> None:
    """Write a bfloat16 copy of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = type(head)(head.config, {"fc.bias"} & head.state_dict().keys())
    copy.load_state_dict(head.state_dict())
    copy.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


# ----------------------------------------------------------------------------------- measuring


@dataclass
class OneRequest:
    """The KV caches of one request; a token's slot is its position. `attend` is the lane's attention.

    Args:
        frozen: Keys and values ``[L, kv_heads, dim]`` of each layer of the target.
        positions: Positions of the tokens of this step.
        read: The number of tokens that the target has read.
    """

    frozen: list[tuple[torch.Tensor, torch.Tensor]]
    positions: torch.Tensor | None = None
    read: int = 0
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """See `graphpact.step.Attend`."""
        del metadata
        if k is None or v is None:
            keys, values = (cache[: self.read] for cache in self.frozen[layer.cache_layer])
            seen = None
        else:
            size = len(self.frozen[0][0]) + 16
            if layer.cache_layer not in self.own:
                self.own[layer.cache_layer] = tuple(t.new_zeros(size, *t.shape[1:]) for t in (k, v))
            keys, values = self.own[layer.cache_layer]
            keys[self.positions], values[self.positions] = k, v
            seen = torch.arange(size) <= self.positions[:, None]
        q, keys, values = (t.transpose(0, 1)[None] for t in (q, keys, values))
        out = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, scale=layer.scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.no_grad()
def accepted_drafts(
    target: LlamaForCausalLM,
    draft: DraftModel,
    text: list[int],
    start: int,
    num_steps: int,
    *,
    blind: bool = False,
) -> list[int]:
    """Return how many drafts of each verification are accepted, when ``text`` is the target's greedy output.

    Drafts are a chain. Every token of ``text`` from ``start + 1`` on is generated by draft and verify.

    Args:
        target: The target, with attention of transformers.
        draft: The draft model.
        text: The ids of a prompt and its continuation.
        start: Length of the prompt.
        num_steps: Drafts of each verification.
        blind: Whether the draft model gets zeros as hidden states.
    """
    given = target.model(torch.tensor([text]), use_cache=True, output_hidden_states=True)
    states = torch.cat([given.hidden_states[i][0] for i in draft.target_layers], dim=-1)
    caches = [
        (one.keys[0].transpose(0, 1), one.values[0].transpose(0, 1)) for one in given.past_key_values.layers
    ]
    request = OneRequest(caches)

    def run(ids: list[int], first: int, hidden: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the most likely next token after the last one, and its hidden state ``[1, H]``."""
        request.positions = torch.arange(first, first + len(ids))
        counts = torch.tensor([len(ids)])
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=torch.tensor(ids),
            positions=request.positions,
            out_cache_loc=request.positions,
            req_pool_indices=torch.ones(1, dtype=torch.int64),
            seq_lens=counts + first,
            seq_lens_cpu=counts + first,
            extend_seq_lens=counts,
            extend_seq_lens_cpu=counts,
            extra={HIDDEN_STATES: torch.zeros_like(hidden) if blind else hidden},
        )
        outputs = draft(batch, None, request.attend)
        return int(outputs.logits[0].argmax()), outputs["hidden_states"]

    accepted, done, newest = [], 0, start
    while newest + num_steps < len(text):
        request.read = newest
        if draft.has_own_kv:  # the hidden states up to the newest token, each with the token after it
            token, hidden = run(text[done + 1 : newest + 1], done, states[done:newest])
            done, first = newest, newest - 1
        else:
            token, hidden = run([text[newest]], newest, states[newest - 1 : newest])
            first = newest
        drafts = [token]
        for step in range(1, num_steps):
            token, hidden = run([token], first + step, hidden)
            drafts.append(token)
        right = 0
        while right < num_steps and drafts[right] == text[newest + 1 + right]:
            right += 1
        accepted.append(right)
        newest += right + 1
    return accepted


@torch.no_grad()
def greedy(target: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Return the ids of a prompt and its greedy continuation by at most ``count`` tokens."""
    ids = torch.tensor([prompt])
    return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[
        0
    ].tolist()


@dataclass
class Acceptance:
    """The result of a measurement: ``accepted`` drafts of each verification, of ``num_steps``."""

    num_steps: int
    accepted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a verification, including the one that the target adds."""
        return 1 + sum(self.accepted) / len(self.accepted)

    def __str__(self) -> str:
        shares = (sum(a > i for a in self.accepted) / len(self.accepted) for i in range(self.num_steps))
        listed = ", ".join(f"{share:.0%}" for share in shares)
        return f"{self.tokens:.2f} tokens a verification (drafts accepted by position: {listed})"


def measure(args: argparse.Namespace, plain: LlamaForCausalLM, folder: Path) -> Acceptance:
    """Return the acceptance of a saved head on all prompts, in float32 as the engine runs it on a CPU."""
    checkpoint = load_checkpoint(
        args.target, dtype=torch.float32, device=torch.device("cpu"), attention=ATTENTION_NAME
    )
    draft = load_draft_model(folder, target=TransformersModel(checkpoint.model))
    total = Acceptance(args.num_steps)
    for prompt in read_prompts(args.prompts):
        text = greedy(plain, prompt, args.tokens)
        one = Acceptance(
            args.num_steps, accepted_drafts(plain, draft, text, len(prompt), args.num_steps, blind=args.blind)
        )
        print(f"{bytes(prompt).decode()!r}: {one}")
        total.accepted += one.accepted
    print(f"all prompts: {total}")
    return total


_CARDS = {
    "eagle": """\
- **Architecture**: `LlamaForCausalLMEagle` (EAGLE-1 and EAGLE-2): a linear map of the token's embedding and
  the target's last hidden state, and one Llama layer with its own KV cache.""",
    "mtp": """\
- **Architecture**: `LlamaForCausalLMFrozenKvMtp`: norms of the token's embedding and of the hidden state, a
  linear map of both, and one layer that attends over the KV cache of the target's last layer and adds no
  keys.""",
}


def write_card(args: argparse.Namespace, head: DraftHead, folder: Path, result: Result) -> None:
    """Write the model card beside the weights."""
    parameters = sum(p.numel() for p in head.parameters())
    size = (folder / "model.safetensors").stat().st_size
    blind = ""
    if args.compare:
        blind = f"\n  A head of the same form that reads no hidden states (`--blind`) reaches {args.compare}."
    loss = "cross-entropy to the target's distribution"
    if args.kind == "eagle":
        loss += " and smooth L1 distance to its hidden states"
    options = f"{args.kind} --minutes {args.minutes:g} --generated {args.generated} --batch {args.batch}"
    card = f"""\
---
license: apache-2.0
language: en
base_model: {args.target.name}
---

# {folder.name}

A draft head for `{args.target.name}`: it guesses what the target would generate next, and the target verifies
several guesses in one pass. {parameters:,} parameters, {size:,} bytes of bfloat16 weights.
The embedding and the language model head are the target's. It is meant for examples, tests and
demonstrations of speculative decoding.

{_CARDS[args.kind]}
- **Acceptance**: {result.acceptance},
  with {args.num_steps} steps, a chain, greedy, on the {result.prompts} prompts of `examples/prompts.txt`,
  each continued by at most {args.tokens} tokens.{blind}
- **Data**: {result.texts:,} texts of {args.length} tokens that the target generated, from the first 8 to 64
  bytes of its own training documents, half of them greedily and half drawn at temperature 0.8; and those
  documents. Three quarters of a batch are generated. No text that begins with a prompt of
  `examples/prompts.txt` was generated for training. The target is small and repeats itself, so parts of the
  measured continuations also occur in the training texts.
- **Training**: {result.steps:,} steps of {args.batch} texts in {args.minutes:g} minutes on a CPU. Each batch
  is run {args.unroll} times, each time on the hidden states of the run before, as drafts are.
  Loss: {loss}.

## Retrain

    python examples/train_draft_heads.py {options}

The result differs from run to run: the learning rate follows the clock, and a faster or less busy
machine takes more steps in the same time.

## Licence

The weights are under the Apache License 2.0. The text they were trained on is from CPython's
documentation strings, copyright Python Software Foundation and others, under the PSF License, and from a
model trained on them.
"""
    (folder / "README.md").write_text(card, encoding="utf-8")


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
    add("--batch", type=int, default=8, help="texts in a step")
    add("--generated", type=int, default=1536, help="texts that the target generates")
    add("--texts", type=Path, help="file that keeps the generated texts for the next run")
    add("--intermediate-size", type=int, default=640, help="width of the feed-forward layer")
    add("--unroll", type=int, default=4, help="runs of each batch, on the hidden states of the run before")
    add("--decay", type=float, default=0.9, help="weight of each run, relative to the one before")
    add("--regression", type=float, default=0.5, help="weight of the distance of hidden states (EAGLE)")
    add("--num-steps", type=int, default=3, help="drafts of each verification that is measured")
    add("--tokens", type=int, default=128, help="the most tokens by which a prompt is continued")
    add("--blind", action="store_true", help="train a head that reads no hidden states, to compare")
    add("--compare", help="the acceptance of such a head, for the model card")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
