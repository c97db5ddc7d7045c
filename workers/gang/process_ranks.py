"""The ranks of a worker as processes: a torch.distributed group, Gloo on CPU and NCCL on GPUs, without a default group.

Sums are gathered from all ranks and added in rank order: Gloo's and NCCL's own sums are not the same in every batch
with three ranks or more. On GPUs the library's sum may be taken instead, in the tolerance class. A rank that is gone
breaks the group of all; one that hangs is found by the beats beside it (leader.py), which end the processes.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from pdserve.cluster.base.errors import RankLostError, first_line
from pdserve.kvtransfer.transports.torch_store import torch_distributed
from pdserve.workers.model.parallel import sum_in_order

COLLECTIVE_TIMEOUT_S = 24 * 3600.0
"""Of one operation: whoever hangs is found sooner, elsewhere."""


class ProcessRank:
    """See RankGroup; used by the thread of the steps only."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        key: str,
        host: str,
        device: torch.device,
        meet_s: float,
        is_ordered: bool = True,
    ) -> None:
        """Meet the other ranks, with Gloo for at most `meet_s`; `host` is where this one listens. Raises RankLostError.

        Args:
            store: a TCPStore that all ranks reach.
            key: secret, the same on every rank.
            is_ordered: add in rank order; otherwise the library sums.
        """
        self.rank = rank
        self.size = size
        self._is_ordered = is_ordered
        self._device = device
        self._is_gloo = device.type == "cpu"
        distributed = torch_distributed()
        prefixed = distributed.PrefixStore(key, store)
        try:
            if self._is_gloo:
                options = distributed.ProcessGroupGloo._Options()
                options._timeout = timedelta(seconds=meet_s)
                options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
                self._group = distributed.ProcessGroupGloo(prefixed, rank, size, options)
            else:
                torch.cuda.set_device(device)
                self._group = distributed.ProcessGroupNCCL(
                    prefixed, rank, size, timedelta(seconds=COLLECTIVE_TIMEOUT_S)
                )
            # NCCL meets at the first operation; Gloo gives each one this time-out.
            self._wait(self._group.allreduce([torch.zeros(1, device=device)]), meet_s)
        except RuntimeError as error:
            raise RankLostError(f"the ranks did not meet: {first_line(error)}") from error

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        part = part.contiguous()
        if not self._is_ordered:
            self._finish(lambda: self._group.allreduce([part]))
            return part
        return sum_in_order(self._gather(part))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See RankGroup."""
        part = part.contiguous()
        if not self._is_gloo:
            parts = self._gather(part)
            return parts if self.rank == 0 else []
        options = torch_distributed().distributed_c10d.GatherOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        self._finish(lambda: self._group.gather([parts] if parts else [], [part], options))
        return parts

    def all_reduce_min(self, value: float) -> float:
        """See RankGroup."""
        parts = self._gather(torch.tensor([value], dtype=torch.float64, device=self._device))
        return min(float(part) for part in parts)

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        options = torch_distributed().distributed_c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self._finish(lambda: self._group.allgather([parts], [part], options))
        return parts

    def _finish(self, begin: Callable[[], Any]) -> None:
        try:
            self._wait(begin(), COLLECTIVE_TIMEOUT_S)
        except RuntimeError as error:
            raise RankLostError(f"another rank is gone: {first_line(error)}") from error

    def _wait(self, work: Any, timeout_s: float) -> None:
        if self._is_gloo:
            work.wait(timedelta(seconds=timeout_s))
        else:
            # Orders the stream, and does not block the thread.
            work.wait()
