"""The runner of a lane: its context, shapes, optional fields and reasons, and the batches that it gets.

Does not: run it; see `graphpact_conformance.lane.rig`.
"""

from collections.abc import Sequence

import torch

from graphpact.attention import (
    Capabilities,
)
from graphpact.batch import ForwardBatch
from graphpact.buffers import GraphSlot
from graphpact.plugin_calls import all_returned
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.draws.cases import declares_graphs
from graphpact_conformance.draws.fields import COUNT, GATHERED, MROPE, drawn_value, is_drawn
from graphpact_conformance.draws.lanes import HIDDEN, Config
from graphpact_conformance.draws.problems import Problem


def planned_shapes(runner: GraphRunner) -> tuple[GraphShape, ...]:
    """Return the shapes that a runner captures, the smallest first; empty if it captures nothing."""
    return tuple(sorted(runner.shapes(), key=lambda s: (s.num_tokens, s.batch_size, s.variant)))


def runner_context(
    config: Config, capabilities: Capabilities, device: torch.device, runner: type[GraphRunner]
) -> RunnerContext:
    """Return the context of a lane's runner.

    It has the sizes to capture, except for runners of ragged modes, which choose their shapes, and for
    runners that need no graph support, which may capture nothing and refuse sizes. It does not limit padding:
    more padding tokens in a batch can reveal more errors.
    """
    mode, limits = config.case.lane_mode, config.limits
    chooses = mode.is_ragged or not declares_graphs(runner)
    return RunnerContext(
        device,
        capabilities,
        limits,
        mode=mode,
        batch_sizes=None if chooses else sorted({s.batch_size for s in config.shapes}),
        token_counts=sorted({s.num_tokens for s in config.shapes}) if mode.is_ragged else None,
        max_padding_ratio=float("inf"),
        lane=mode.value,
        num_token_non_padded=config.counts or config.fields,
        require_gathered_buffer=config.counts and config.gathers,
        hidden_size=HIDDEN,
        dtype=config.dtype,
        layers=config.layers,
        mrope=config.case.embeds or config.fields,
        input_embeds=config.case.embeds,
        pp_proxy_tensors={"hidden_states": HIDDEN} if config.case.embeds else {},
    )


def fields_of(runner: GraphRunner) -> tuple[GraphSlot, ...]:
    """Return the slots of optional fields: of the batch, and of a runner's own by dotted names."""
    return tuple(filter(is_drawn, all_returned(runner.slots(), GraphSlot, runner, "slots")))


def drawn_batch(
    problem: Problem, config: Config, fields: Sequence[GraphSlot], device: torch.device
) -> ForwardBatch:
    """Return the batch of a problem, with a value for each optional field that has a slot.

    Fields of slots that are declared optional are absent in some batches. The batch carries embeddings if the
    lane's batches do.

    In a runner's own fields floats are normal, but negative in fields of one number for each row, such as log
    probabilities; integers are token ids. Rows of one request that a frozen cache repeats are equal.
    """
    names = {slot.name for slot in fields}
    batch = problem.batch(counts=config.counts or COUNT in names)
    total = torch.tensor([len(problem.tokens)], dtype=torch.int32)
    extra = {}
    for slot in fields:
        if slot.name in GATHERED:
            setattr(batch, slot.name, total.expand(slot.shape_fn(1, 1)).clone())
        elif slot.name != COUNT and (value := drawn_value(problem, slot, config)) is not None:
            if "." in slot.name:
                extra[slot.name] = value
            else:
                setattr(batch, slot.name, value)
    batch.extra = extra
    if config.case.embeds:
        batch.input_embeds, batch.mrope_positions = problem.embedded(config)
    return batch if device.type == "cpu" else batch.to(device)


def batch_beside(
    problem: Problem, whole: Problem, config: Config, fields: Sequence[GraphSlot], device: torch.device
) -> ForwardBatch:
    """Return the batch of some requests of another batch, with the optional fields that they have in it.

    Args:
        problem: The requests, in any order, under the seed of ``whole``.
        whole: The other batch.
        config: The configuration of the lane, without embeddings.
        fields: See `drawn_batch`.
        device: The device of the batch.
    """
    batch = drawn_batch(problem, config, fields, device)
    theirs, rows = drawn_batch(whole, config, fields, device).tensors(), whole.rows_of(problem.requests)
    own = [slot for slot in fields if slot.axis != "none" and slot.name in theirs]
    return batch.with_tensors(
        {
            slot.name: theirs[slot.name].index_select(
                -1 if slot.name == MROPE else 0, torch.tensor(rows[slot.axis], device=device)
            )
            for slot in own
        }
    )


_OF_THE_CORE = tuple(value for value in vars(EagerReason).values() if isinstance(value, EagerReason))


def own_reasons(runner: GraphRunner) -> tuple[EagerReason, ...]:
    """Return the declared reasons with which a runner may leave a batch to an eager step.

    Reasons of the core are left out: they say that no captured shape holds a batch.

    Raises:
        EngineError: ``declines`` is no collection of reasons.
    """
    declared = all_returned(runner.declines, EagerReason, runner, "declines")
    return tuple(reason for reason in declared if reason not in _OF_THE_CORE)
