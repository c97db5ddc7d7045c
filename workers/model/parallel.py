"""Tensor parallelism: what a rank computes of a model, and what the ranks of a worker tell each other in a step.

Weights are split as Megatron-LM splits them (Shoeybi et al. 2019, section 3): query, key, value and the MLP's inner
width by columns, the projections back by rows, so a layer has two sums over the ranks; experts, the embedding and the
head by their rows. Sums are added in rank order, so a text has the same bits wherever the number of ranks is the same.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from pdserve.cluster.base.errors import RankLostError

Result = TypeVar("Result")


class RankGroup(Protocol):
    """The ranks of one worker, seen from one of them. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's tensor, added in rank order; `part` may be overwritten.

        Raises RankLostError if a rank does not take part.
        """

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor on rank 0, nothing on the others. All have one shape. Raises RankLostError."""

    def all_reduce_min(self, value: float) -> float:
        """Return the smallest of every rank's values. Raises RankLostError."""


class SoloRank:
    """A worker of one rank."""

    rank = 0
    size = 1

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See RankGroup."""
        return [part]

    def all_reduce_min(self, value: float) -> float:
        """See RankGroup."""
        return value


SOLO = SoloRank()


def part_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first and one past the last of `total` things that a rank holds; parts differ by one at most."""
    return rank * total // size, (rank + 1) * total // size


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, added one after the other."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


class _Exchange:
    """Where the threads of a `thread_ranks` group meet."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.parts: list[torch.Tensor | None] = [None] * size
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(size)


class ThreadRank:
    """One of several ranks that are threads of one process."""

    def __init__(self, rank: int, exchange: _Exchange) -> None:
        self.rank = rank
        self._exchange = exchange

    @property
    def size(self) -> int:
        """See RankGroup."""
        return len(self._exchange.parts)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return self._meet(part, sum_in_order)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See RankGroup."""
        return self._meet(part, lambda parts: [part.clone() for part in parts] if self.rank == 0 else [])

    def all_reduce_min(self, value: float) -> float:
        """See RankGroup."""
        part = torch.tensor([value], dtype=torch.float64)
        return self._meet(part, lambda parts: min(float(part) for part in parts))

    def _meet(self, part: torch.Tensor, read: Callable[[list[torch.Tensor]], Result]) -> Result:
        exchange = self._exchange
        exchange.parts[self.rank] = part
        try:
            exchange.barrier.wait(exchange.timeout_s)
            result = read([part for part in exchange.parts if part is not None])
            # A rank may overwrite its part from here on.
            exchange.barrier.wait(exchange.timeout_s)
        except threading.BrokenBarrierError as error:
            raise RankLostError("another rank takes no part in the step") from error
        return result


def thread_ranks(size: int, timeout_s: float = 60.0) -> list[ThreadRank]:
    """Return a group whose ranks are threads of this process: for tests, which then need no other process."""
    exchange = _Exchange(size, timeout_s)
    return [ThreadRank(rank, exchange) for rank in range(size)]
