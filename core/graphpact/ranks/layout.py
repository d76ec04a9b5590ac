"""`RankLayout`: which ranks share a layer's weights, which share requests, and which have a replica each.

    world        ranks of all replicas: ``data * pipeline * tensor``
    replica      ``pipeline * tensor`` consecutive ranks with one copy of the model. They step together.
    stage        ``tensor`` consecutive ranks of a replica, with a part of its layers
    pipeline     ranks at the same place of all stages of a replica. Hidden states go from each to the next.
    attention    in a stage, ``attention_data`` groups of consecutive ranks. Each group has its own requests,
                 KV cache and scheduler, the same in every stage, and splits attention heads among its ranks.
                 All other layers are split among the whole stage.

With ``tensor=4, attention_data=2``, ranks 0 and 1 share requests and attention, and so do ranks 2 and 3; the
experts and the feed-forward layers are split among all four.

Does not: create process groups.
"""

from dataclasses import dataclass

from graphpact.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The sizes of the groups, and the place of this process.

    Args:
        rank: This process among all processes.
        tensor: Ranks of a stage.
        data: Replicas.
        attention_data: Groups of a stage with requests of their own.
        pipeline: Stages of a replica.

    Raises:
        ConfigError: A size is below 1, ``attention_data`` does not divide ``tensor``, or there is no such
            rank.
    """

    rank: int = 0
    tensor: int = 1
    data: int = 1
    attention_data: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.data, self.attention_data, self.pipeline) < 1:
            sizes = (
                f"tensor {self.tensor}, data {self.data}, attention_data {self.attention_data},"
                f" pipeline {self.pipeline}"
            )
            raise ConfigError(f"sizes of ranks: {sizes}", hint="give whole numbers from 1 up")
        if self.tensor % self.attention_data:
            raise ConfigError(
                f"attention_data {self.attention_data} does not divide tensor {self.tensor}",
                hint="each group with its own requests has the same number of a stage's ranks",
            )
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank {self.rank} of {self.world} ranks"
                f" (data {self.data} x pipeline {self.pipeline} x tensor {self.tensor})",
                hint="start data * pipeline * tensor processes; ranks count from 0",
            )

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.data * self.pipeline * self.tensor

    @property
    def attention_tensor(self) -> int:
        """Ranks of one attention group."""
        return self.tensor // self.attention_data

    @property
    def replica(self) -> int:
        """The replica of this process, from 0."""
        return self.rank // (self.pipeline * self.tensor)

    @property
    def stage(self) -> int:
        """The stage of this process in its replica, from 0."""
        return self.rank // self.tensor % self.pipeline

    @property
    def tensor_rank(self) -> int:
        """This process in its stage, from 0."""
        return self.rank % self.tensor

    @property
    def attention_group(self) -> int:
        """The attention group of this process in its stage, from 0."""
        return self.tensor_rank // self.attention_tensor

    @property
    def attention_rank(self) -> int:
        """This process in its attention group, from 0."""
        return self.tensor_rank % self.attention_tensor

    @property
    def request_groups(self) -> int:
        """Groups with requests of their own, in all replicas."""
        return self.data * self.attention_data

    @property
    def request_group(self) -> int:
        """The group of this process among `request_groups`; request ``i`` belongs to ``i % groups``."""
        return self.replica * self.attention_data + self.attention_group

    def padded_rows(self, num_tokens: int) -> int:
        """Return the smallest number of rows from ``num_tokens`` up that a group's ranks can divide."""
        return -(-num_tokens // self.attention_tensor) * self.attention_tensor

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of each replica."""
        return _slices(self.world, self.pipeline * self.tensor)

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each stage, of all replicas."""
        return _slices(self.world, self.tensor)

    @property
    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, of all replicas, in the order of the stages."""
        return [replica[place :: self.tensor] for replica in self.replicas for place in range(self.tensor)]

    @property
    def attention_groups(self) -> list[list[int]]:
        """The ranks of each attention group, of all stages and replicas."""
        return _slices(self.world, self.attention_tensor)

    @property
    def sharing(self) -> list[list[int]]:
        """The places in a replica, from 0, of the ranks of each group with requests of its own."""
        groups = _slices(self.tensor, self.attention_tensor)
        return [
            [stage * self.tensor + place for stage in range(self.pipeline) for place in group]
            for group in groups
        ]


def _slices(count: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, count, size)]
