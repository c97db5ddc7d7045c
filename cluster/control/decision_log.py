"""Why requests went where they went: the latest decisions with their best candidates. Pure.

Noting one costs a few array look-ups; what is shown is made when somebody asks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.ids import RequestId, WorkerId
from pdserve.cluster.base.route import Candidate, Decision, Placeable
from pdserve.cluster.base.timeline import is_of_client_request

MOST_DECISIONS = 4096
MOST_CANDIDATES = 16
"""Of one decision."""


@dataclass(frozen=True, slots=True)
class CandidateTable:
    """Candidates, best first; the numbers of each as Candidate has them, [candidates, 9]."""

    owners: Sequence[WorkerId]
    prefills: Sequence[WorkerId | None]
    numbers: NDArray[np.float64]
    is_refused: bool

    def rows(self) -> tuple[Candidate, ...]:
        """Return them one by one."""
        return tuple(
            Candidate(
                owner=owner,
                prefill=prefill,
                is_chosen=not place and not self.is_refused,
                room_s=row[0],
                queue_s=row[1],
                compute_s=row[2],
                transfer_s=row[3],
                decode_s=row[4],
                inflicted_s=row[5],
                num_cached_by_owner=int(row[6]),
                num_cached_by_prefill=int(row[7]),
                total_s=row[8],
            )
            for place, (owner, prefill, row) in enumerate(
                zip(self.owners, self.prefills, self.numbers.tolist(), strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class _Record:
    time: float
    request_id: RequestId
    attempt: int
    num_tokens: int
    num_considered: int
    reason: str
    table: CandidateTable


class DecisionLog:
    """A bounded list of them."""

    def __init__(self, clock: Clock, most: int = MOST_DECISIONS) -> None:
        self._clock = clock
        self._records: deque[_Record] = deque(maxlen=most)

    def __len__(self) -> int:
        """Decisions that are remembered."""
        return len(self._records)

    def add(self, request: Placeable, reason: str, table: CandidateTable, num_considered: int) -> None:
        """Note one."""
        self._records.append(
            _Record(
                self._clock.now(),
                request.request_id,
                request.attempt,
                request.num_tokens,
                num_considered,
                reason,
                table,
            )
        )

    def matching(self, client_id: str) -> tuple[Decision, ...]:
        """Return the decisions about a client request, oldest first."""
        now = self._clock.now()
        return tuple(
            Decision(
                request_id=record.request_id,
                attempt=record.attempt,
                age_s=now - record.time,
                num_prompt_tokens=record.num_tokens,
                num_considered=record.num_considered,
                reason=record.reason,
                candidates=record.table.rows(),
            )
            for record in self._records
            if is_of_client_request(record.request_id, client_id)
        )
