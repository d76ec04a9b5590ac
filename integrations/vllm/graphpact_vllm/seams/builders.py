"""`Builders`: what each metadata builder of vLLM made last.

Both model runners make their builders by ``AttentionGroup.create_metadata_builders``, and call them for each
step. A builder returns new metadata, which layers find in the forward context.

Does not: change what a builder makes.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from vllm.v1.attention.backend import CommonAttentionMetadata

from graphpact_vllm.seams.graphs import V1_RUNNER, V2_RUNNER
from graphpact_vllm.seams.hooking import wrap

_CREATE = "vllm.v1.worker.utils.AttentionGroup.create_metadata_builders"
_METHODS = ("build", "build_for_cudagraph_capture", "build_for_drafting", "update_block_table")
"""The methods of a builder that return metadata."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder made for a step.

    Args:
        metadata: What its layers read.
        common: What it was made of, a ``CommonAttentionMetadata``; None if another builder's metadata was
            copied.
        layers: The names of its layers.
        page_size: KV slots of a page of its block table; 0 if its layers have no keys.
        is_recurrent: Whether its layers keep a recurrent state instead of keys.
        pads_rows_itself: Whether its padding rows are others than vLLM's.
    """

    metadata: Any
    common: Any
    layers: tuple[str, ...]
    page_size: int
    is_recurrent: bool
    pads_rows_itself: bool = False


class Builders:
    """The metadata builders of this process.

    Attributes:
        watchers: Are called with a builder and what it made, after each build.
        is_dummy: Whether the current step has a dummy batch, by which an idle rank takes part in the step of
            the others. It has no requests, and writes no keys.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[Any, Built], None]] = []
        self.is_dummy = False
        self._builders: list[weakref.ref[Any]] = []
        self._built: weakref.WeakKeyDictionary[Any, Built] = weakref.WeakKeyDictionary()
        self._names: dict[int, str] = {}

    def register(self) -> None:
        """Watch every builder that is made from now on."""
        wrap(_CREATE, self._create)
        for runner in (V1_RUNNER, V2_RUNNER):
            wrap(f"{runner}._dummy_run", self._dummy_run)

    def current(self) -> dict[str, Built]:
        """Return what each builder made last, by its name: its class, with a number if there are several."""
        return {
            name: built
            for name, builder in self.instances().items()
            if (built := self._built.get(builder)) is not None
        }

    def num_tokens(self, names: Collection[str] | None = None) -> int | None:
        """Return the tokens of the current step without padding; None if unknown.

        Args:
            names: The builders of the step's layers; None for all.
        """
        if self.is_dummy:
            return 0
        commons = [
            built.common
            for name, built in self.current().items()
            if built.common is not None and (names is None or name in names)
        ]
        return min((int(common.query_start_loc_cpu[-1]) for common in commons), default=None)

    def instances(self) -> dict[str, Any]:
        """Return the builders by name."""
        if not self._names:
            self._name()
        builders = [builder for each in self._builders if (builder := each()) is not None]
        return {self._names[id(builder)]: builder for builder in builders}

    def _dummy_run(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_dummy = True
        try:
            return original(runner, *args, **kwargs)
        finally:
            self.is_dummy = False

    def _name(self) -> None:
        builders = [builder for each in self._builders if (builder := each()) is not None]
        counts = Counter(type(builder).__name__ for builder in builders)
        seen: Counter[str] = Counter()
        for builder in builders:
            name = type(builder).__name__
            self._names[id(builder)] = name if counts[name] == 1 else f"{name}[{seen[name]}]"
            seen[name] += 1

    def _create(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        original(group, *args, **kwargs)
        self._builders = [each for each in self._builders if each() is not None]
        self._names.clear()
        for builder in group.metadata_builders:
            self._builders.append(weakref.ref(builder))
            self._watch(builder, group)

    def _watch(self, builder: Any, group: Any) -> None:
        spec = group.kv_cache_spec
        layers = tuple(group.layer_names)
        page_size = getattr(builder.kv_cache_spec, "block_size", 0)
        is_recurrent = bool(group.backend.is_ssm()) or "Mamba" in type(spec).__name__
        pads_rows_itself = bool(getattr(builder, "pads_rows_itself", False))
        reference = weakref.ref(builder)

        def watched(name: str) -> Any:
            build = getattr(type(builder), name)

            @functools.wraps(build)
            def method(*args: Any, **kwargs: Any) -> Any:
                its = reference()
                metadata = build(its, *args, **kwargs)
                given = (*args, *kwargs.values())
                common = next((each for each in given if isinstance(each, CommonAttentionMetadata)), None)
                self._built[its] = built = Built(
                    metadata, common, layers, page_size, is_recurrent, pads_rows_itself
                )
                for watcher in self.watchers:
                    watcher(its, built)
                return metadata

            return method

        for name in _METHODS:
            if hasattr(builder, name):
                setattr(builder, name, watched(name))
