"""Room for requests whose KV arrives from elsewhere: a place in the running batch, and blocks.

The I/O loop reserves without waiting for a step. What the prefix cache holds of the prompt is referenced at once; the
rest is a promise until the transfer starts, then blocks. A reservation ends by joining the batch (the scheduler takes
row and blocks over) or by `release`.
"""

from collections.abc import Sequence

from pdserve.cluster.base.prefix_hash import PrefixHash
from pdserve.workers.engine.block_pool import NO_BLOCK, BlockLists, BlockPool
from pdserve.workers.engine.prefix_cache import FirstBlocks
from pdserve.workers.engine.row_tables import RowTables
from pdserve.workers.engine.sequence import blocks_for


class Reservation:
    """A row and blocks. Made by Reservations.

    Attributes:
        blocks: what is held: at first the cached prefix, everything once it is bound.
        num_cached_blocks: whole blocks of that prefix; they are shared, so nobody may write them.
        promised: blocks per group that are promised and not bound.
    """

    __slots__ = ("blocks", "num_cached_blocks", "num_tokens", "promised", "row")

    def __init__(self, row: int, blocks: BlockLists, num_tokens: int, promised: list[int]) -> None:
        self.row = row
        self.blocks = blocks
        self.num_cached_blocks = len(blocks[0])
        self.num_tokens = num_tokens
        self.promised = promised

    @property
    def is_bound(self) -> bool:
        """True if nothing is promised any more."""
        return not any(self.promised)


class Reservations:
    """Makes reservations out of a worker's pool and rows, on the I/O loop.

    They end there, or by joining, on the engine's thread; a reservation belongs to one of the two at a time.
    """

    def __init__(self, pool: BlockPool, tables: RowTables, firsts: FirstBlocks, block_size: int) -> None:
        self._pool = pool
        self._tables = tables
        self._firsts = firsts
        self._block_size = block_size
        self._open: set[Reservation] = set()

    def __len__(self) -> int:
        """Reservations that neither joined nor were released."""
        return len(self._open)

    def reserve(self, num_tokens: int, chain: Sequence[PrefixHash] = ()) -> Reservation | None:
        """Reserve room for the KV of `num_tokens` and one more, and a place in the batch; None if there is none now.

        Args:
            num_tokens: tokens whose KV arrives, or is cached.
            chain: names of the whole blocks that may be taken from the prefix cache.
        """
        row = self._tables.take_row()
        if row is None:
            return None
        reservation = self._reserve(row, num_tokens, chain)
        if reservation is None and chain:
            # With a hit a group with a window holds two: the hit's, and the one at the end.
            reservation = self._reserve(row, num_tokens, ())
        if reservation is None:
            self._tables.return_row(row)
            return None
        self._open.add(reservation)
        return reservation

    def _reserve(self, row: int, num_tokens: int, chain: Sequence[PrefixHash]) -> Reservation | None:
        blocks = self._pool.acquire_prefix(chain, self._firsts)
        end = blocks_for(num_tokens + 1, self._block_size)
        promised = [end - self._first_new(group, num_tokens, len(blocks[0])) for group in range(len(blocks))]
        if not self._pool.promise(promised):
            for group, held in enumerate(blocks):
                self._pool.release(group, held)
            return None
        return Reservation(row, blocks, num_tokens, promised)

    def _first_new(self, group: int, num_tokens: int, num_cached_blocks: int) -> int:
        """Return the first block to bind: behind the cached prefix, and not before the window of what follows."""
        return max(num_cached_blocks, self._firsts.kept_at(group, num_tokens))

    def bind(self, reservation: Reservation) -> None:
        """Turn the promise into blocks; nothing changes if it is bound."""
        if reservation.is_bound:
            return
        bound = self._pool.redeem(reservation.promised)
        for group, (held, added) in enumerate(zip(reservation.blocks, bound, strict=True)):
            first = self._first_new(group, reservation.num_tokens, reservation.num_cached_blocks)
            held += [NO_BLOCK] * (first - len(held)) + added
        reservation.promised = [0] * len(reservation.promised)

    def grow(self, reservation: Reservation, num_tokens: int) -> bool:
        """Make a bound reservation hold `num_tokens`; False if the blocks cannot be had now."""
        missing = blocks_for(num_tokens, self._block_size) - len(reservation.blocks[0])
        if missing <= 0:
            return True
        new = self._pool.allocate([missing] * len(reservation.blocks))
        if new is None:
            return False
        for held, added in zip(reservation.blocks, new, strict=True):
            held += added
        return True

    def trim(self, reservation: Reservation, num_tokens: int) -> None:
        """Keep the blocks of the first `num_tokens` only, and give up what is promised: the rest is computed here."""
        self._pool.cancel(reservation.promised)
        reservation.promised = [0] * len(reservation.promised)
        count = blocks_for(num_tokens, self._block_size)
        reservation.num_cached_blocks = min(reservation.num_cached_blocks, count)
        for group, held in enumerate(reservation.blocks):
            self._pool.release(group, held[count:])
            del held[count:]

    def joined(self, reservation: Reservation) -> None:
        """The scheduler owns row and blocks from here."""
        self._open.remove(reservation)

    def release(self, reservation: Reservation) -> None:
        """Give everything back. Nobody may still write the blocks."""
        self._open.remove(reservation)
        self._pool.cancel(reservation.promised)
        for group, held in enumerate(reservation.blocks):
            self._pool.release(group, held)
        self._tables.return_row(reservation.row)

    def held(self, group: int) -> list[int]:
        """Return the blocks that open reservations hold, for checks."""
        return [block for reservation in self._open for block in reservation.blocks[group] if block != NO_BLOCK]
