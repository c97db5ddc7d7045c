"""Room for requests whose KV arrives from elsewhere: a place in the running batch, and blocks.

The I/O loop reserves without waiting for a step. A reservation is a promise until its transfer starts, then blocks; it
ends by joining the batch (the scheduler takes row and blocks over) or by `release`.
"""

from pdserve.workers.engine.block_pool import BlockLists, BlockPool
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import blocks_for


class Reservation:
    """A row and blocks; `blocks` is empty until it is bound. Made by Reservations."""

    __slots__ = ("blocks", "num_promised", "row")

    def __init__(self, row: int, num_promised: int, num_groups: int) -> None:
        self.row = row
        self.num_promised = num_promised
        self.blocks: BlockLists = [[] for _ in range(num_groups)]


class Reservations:
    """Makes reservations out of a worker's pool and rows, on the I/O loop.

    They end there, or by joining, on the engine's thread; a reservation belongs to one of the two at a time.
    """

    def __init__(self, pool: BlockPool, tables: RowTables, block_size: int) -> None:
        self._pool = pool
        self._tables = tables
        self._block_size = block_size
        self._open: set[Reservation] = set()

    def __len__(self) -> int:
        """Reservations that neither joined nor were released."""
        return len(self._open)

    def reserve(self, num_tokens: int) -> Reservation | None:
        """Reserve room for `num_tokens` and a place in the batch; None if there is none now."""
        count = blocks_for(num_tokens, self._block_size)
        row = self._tables.take_row()
        if row is None:
            return None
        if not self._pool.promise(count):
            self._tables.return_row(row)
            return None
        reservation = Reservation(row, count, self._pool.num_groups)
        self._open.add(reservation)
        return reservation

    def bind(self, reservation: Reservation) -> None:
        """Turn the promise into blocks; nothing changes if it is bound."""
        if reservation.num_promised:
            reservation.blocks = self._pool.redeem(reservation.num_promised)
            reservation.num_promised = 0

    def grow(self, reservation: Reservation, num_tokens: int) -> bool:
        """Make a bound reservation hold `num_tokens`; False if the blocks cannot be had now."""
        missing = blocks_for(num_tokens, self._block_size) - len(reservation.blocks[0])
        if missing <= 0:
            return True
        new = self._pool.allocate(missing)
        if new is None:
            return False
        for held, added in zip(reservation.blocks, new, strict=True):
            held.extend(added)
        return True

    def joined(self, reservation: Reservation) -> None:
        """The scheduler owns row and blocks from here."""
        self._open.remove(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give everything back. Nobody may still write the blocks."""
        self._open.remove(reservation)
        self._pool.cancel(reservation.num_promised)
        for group, blocks in enumerate(reservation.blocks):
            self._pool.release(group, blocks)
        self._tables.return_row(reservation.row)

    def held(self, group: int) -> list[int]:
        """Return the blocks that open reservations hold, for checks."""
        return [block for reservation in self._open for block in reservation.blocks[group]]
