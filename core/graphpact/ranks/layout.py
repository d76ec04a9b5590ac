"""`RankLayout`: which ranks share a layer's weights, which share requests, and which have a replica each.

    world        ranks of all replicas: ``data * tensor``
    replica      ``tensor`` consecutive ranks with one copy of the model. They step together.
    attention    in a replica, ``attention_data`` groups of consecutive ranks. Each group has its own
                 requests, KV cache and scheduler, and splits attention heads among its ranks. All other
                 layers are split among the whole replica.

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
        tensor: Ranks of a replica.
        data: Replicas.
        attention_data: Groups of a replica with requests of their own.

    Raises:
        ConfigError: A size is below 1, ``attention_data`` does not divide ``tensor``, or there is no such
            rank.
    """

    rank: int = 0
    tensor: int = 1
    data: int = 1
    attention_data: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.data, self.attention_data) < 1:
            sizes = f"tensor {self.tensor}, data {self.data}, attention_data {self.attention_data}"
            raise ConfigError(f"sizes of ranks: {sizes}", hint="give whole numbers from 1 up")
        if self.tensor % self.attention_data:
            raise ConfigError(
                f"attention_data {self.attention_data} does not divide tensor {self.tensor}",
                hint="each group with its own requests has the same number of a replica's ranks",
            )
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank {self.rank} of {self.world} ranks (data {self.data} x tensor {self.tensor})",
                hint="start data * tensor processes; ranks count from 0",
            )

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.data * self.tensor

    @property
    def attention_tensor(self) -> int:
        """Ranks of one attention group."""
        return self.tensor // self.attention_data

    @property
    def replica(self) -> int:
        """The replica of this process, from 0."""
        return self.rank // self.tensor

    @property
    def tensor_rank(self) -> int:
        """This process in its replica, from 0."""
        return self.rank % self.tensor

    @property
    def attention_group(self) -> int:
        """The attention group of this process in its replica, from 0."""
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
        return _slices(self.world, self.tensor)

    @property
    def attention_groups(self) -> list[list[int]]:
        """The ranks of each attention group, of all replicas."""
        return _slices(self.world, self.attention_tensor)


def _slices(count: int, size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, count, size)]
