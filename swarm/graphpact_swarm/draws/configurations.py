"""`Space`: the features of an engine and of loads, and the values that a seed draws of them.

Does not: draw requests; `graphpact_swarm.draws.loads` does.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from graphpact.engines import EngineStart, Feature, LoadOffer
from graphpact.errors import EngineError

SEEDS_PER_START = 4
"""Seeds of one block: they share a configuration, so that an engine starts once for them."""
_TRIES = 50

LOAD_FEATURES: tuple[Feature, ...] = (
    Feature(name="requests", values=(3, 1, 6, 12, "bucket", "crowd")),
    Feature(name="lengths", values=("any", "one", "page", "bucket", "chunk", "verify", "window", "longest")),
    Feature(name="answers", values=("short", "one", "long", "longest")),
    Feature(name="arrivals", values=("together", "trickle", "bursts", "lulls")),
    Feature(name="prefixes", values=("own", "shared", "nested", "equal")),
    Feature(name="text", values=("random", "repeated")),
    Feature(name="stops", values=(False, True)),
    Feature(name="aborts", values=(False, True)),
    Feature(name="logprobs", values=("none", "some", "all")),
)
"""The features of loads. Numbers are drawn at landmarks of the engine, and next to them."""
FAULT_FEATURE = Feature(name="fault", values=("none", "raise", "full", "kill", "slow"))
"""The feature of runs with ``--faults``. The last two are for several ranks."""


@dataclass(frozen=True)
class Space:
    """The configurations of an engine, and the loads.

    Args:
        engine: The name of the engine.
        offer: What it offers.
        models: The folders of models to draw from, by name, the plainest first.
        drafts: Values of the feature ``drafts`` whose draft model is there.
        has_faults: Whether faults are drawn.
        fixed: Features with one value only.
    """

    engine: str
    offer: LoadOffer
    models: Mapping[str, Path]
    drafts: frozenset[str] = frozenset()
    has_faults: bool = False
    fixed: Mapping[str, Any] | None = None

    def engine_features(self) -> list[Feature]:
        """Return the features that an engine is started with."""
        found = [Feature(name="model", values=tuple(self.models)), *self.offer.features()]
        return [self._narrowed(each) for each in found]

    def load_features(self) -> list[Feature]:
        """Return the features of a load."""
        found = [*LOAD_FEATURES, *([FAULT_FEATURE] if self.has_faults else [])]
        return [self._narrowed(each) for each in found]

    def plain(self) -> dict[str, Any]:
        """Return the plainest value of each feature of the engine."""
        return {each.name: each.values[0] for each in self.engine_features()}

    def configuration(self, seed: int) -> dict[str, Any]:
        """Return the value of each feature of the engine for ``seed``; seeds of one block have the same.

        Raises:
            EngineError: The engine refuses its plainest configuration.
        """
        random = Random(f"{self.engine} configuration {seed // SEEDS_PER_START}")  # noqa: S311  a draw
        features = self.engine_features()
        for _ in range(_TRIES):
            choice = {each.name: _drawn(random, each) for each in features}
            if self.refused(choice) is None:
                return choice
        # Most features are refused together: go towards the plainest one by one.
        for each in random.sample(features, len(features)):
            choice[each.name] = each.values[0]
            if (reason := self.refused(choice)) is None:
                return choice
        raise EngineError(f"{self.engine} refuses its plainest configuration: {reason}")

    def refused(self, choice: Mapping[str, Any]) -> str | None:
        """Return why the engine refuses a configuration, or None."""
        return self.offer.refused(EngineStart(choice=choice, model=self.models[choice["model"]]))

    def load(self, seed: int) -> dict[str, Any]:
        """Return the value of each feature of the load of ``seed``."""
        random = Random(f"{self.engine} load {seed}")  # noqa: S311  a draw
        chosen = {each.name: _drawn(random, each) for each in self.load_features()}
        if self.offer.ranks(self.configuration(seed)) == 1 and chosen.get("fault") in ("kill", "slow"):
            chosen["fault"] = "raise" if chosen["fault"] == "kill" else "full"
        return chosen

    def _narrowed(self, feature: Feature) -> Feature:
        """Return a feature with its fixed value, or with the values that are possible."""
        fixed = self.fixed or {}
        if feature.name in fixed:
            return replace(feature, values=(fixed[feature.name],))
        return replace(
            feature, values=tuple(value for value in feature.values if self._is_possible(feature.name, value))
        )

    def _is_possible(self, feature: str, value: Any) -> bool:
        """Return whether everything is there that a value needs."""
        needs_a_model = feature == "drafts" and value in self.offer.draft_models
        return not needs_a_model or value in self.drafts


def _drawn(random: Random, feature: Feature) -> Any:
    plain, *others = feature.values
    return plain if not others or random.random() < feature.plain_share else random.choice(others)


def pairs_of(choice: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the pairs of values of a drawn configuration and load, as texts such as ``page_size=16``."""
    return set(itertools.combinations(sorted(value_name(*item) for item in choice.items()), 2))


def value_name(feature: str, value: Any) -> str:
    """Return the text of a value, such as ``page_size=16``."""
    return f"{feature}={value if isinstance(value, str) else json.dumps(value)}"
