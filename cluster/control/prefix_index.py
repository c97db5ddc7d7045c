"""Which worker holds the KV of which prefix: fed by the workers' cache events, asked by the placement. Pure.

Names are those of cluster/base/prefix_hash. A worker's events are numbered: what follows a gap is not taken in, and the
worker is asked for a snapshot. What a request just placed will leave behind is counted at once (`expect`), for a few
seconds: requests of one prefix that come together go to one place. Bounded: beyond `most_names` the oldest ones are
forgotten, which makes hits look smaller than they are and harms nothing else.
"""

from collections.abc import Iterable

from pdserve.cluster.base.clock import Clock
from pdserve.cluster.base.ids import Incarnation, WorkerId
from pdserve.cluster.base.messages import CacheUpdate
from pdserve.cluster.base.prefix_hash import NAME_BYTES, UNIT_TOKENS, PrefixHash, PrefixIdentity, split_names
from pdserve.cluster.base.route import PrefixChain
from pdserve.cluster.base.worker_info import WorkerInfo

MOST_NAMES = 1 << 19
EXPECTED_S = 5.0


_Kind = tuple[PrefixIdentity, int]
"""Workers of one kind give the same names to the same prefixes: by identity, and units of a block."""


class _Source:
    """One life of a worker, as a bit."""

    def __init__(self, bit: int, incarnation: Incarnation, kind: _Kind) -> None:
        self.bit = bit
        self.incarnation = incarnation
        self.kind = kind
        self.next_no: int | None = None


class PrefixIndex:
    """The table: name → the workers that hold it, as a bit mask."""

    def __init__(self, clock: Clock, most_names: int = MOST_NAMES) -> None:
        self._clock = clock
        self._most_names = most_names
        self._holders: dict[PrefixHash, int] = {}
        self._expected: dict[PrefixHash, int] = {}
        self._long_expected: dict[PrefixHash, int] = {}
        self._turn_time = clock.now()
        self._sources: dict[WorkerId, _Source] = {}
        self._workers_of: dict[_Kind, dict[int, WorkerId]] = {}
        self._free_bits: list[int] = []
        self._num_bits = 0
        self.num_gaps = 0
        self.num_forgotten = 0

    def __len__(self) -> int:
        """Names that somebody is known to hold."""
        return len(self._holders)

    def add_worker(self, info: WorkerInfo) -> None:
        """A worker is there; one of another life begins anew."""
        source = self._sources.get(info.worker_id)
        if source is not None and source.incarnation == info.incarnation:
            return
        self.remove_worker(info.worker_id)
        bit = self._free_bits.pop() if self._free_bits else 1 << self._num_bits
        self._num_bits = max(self._num_bits, bit.bit_length())
        kind = info.prefix_identity, info.block_size // UNIT_TOKENS
        self._sources[info.worker_id] = _Source(bit, info.incarnation, kind)
        self._workers_of.setdefault(kind, {})[bit] = info.worker_id

    def remove_worker(self, worker_id: WorkerId) -> None:
        """A worker is gone, and what it held."""
        source = self._sources.pop(worker_id, None)
        if source is not None:
            self._clear(source.bit)
            self._free_bits.append(source.bit)
            del self._workers_of[source.kind][source.bit]

    def update(self, update: CacheUpdate) -> bool:
        """Take a worker's changes in; False if some are missing before them: it must send a snapshot."""
        source = self._sources.get(update.worker_id)
        if source is None or source.incarnation != update.incarnation:
            return True
        if update.is_snapshot:
            self._clear(source.bit)
        elif update.first_no != source.next_no:
            self.num_gaps += source.next_no is not None
            source.next_no = None
            return False
        source.next_no = update.next_no
        self._store(split_names(update.stored), source.bit)
        for name in split_names(update.evicted):
            left = self._holders.get(name, 0) & ~source.bit
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)
        return True

    def expect(self, chains: Iterable[PrefixChain], worker_ids: Iterable[WorkerId]) -> None:
        """These workers will hold a prompt in a moment."""
        self._forget_expected()
        bits_of: dict[PrefixIdentity, int] = {}
        for worker_id in worker_ids:
            source = self._sources.get(worker_id)
            if source is not None:
                identity = source.kind[0]
                bits_of[identity] = bits_of.get(identity, 0) | source.bit
        expected = self._expected
        for chain in chains:
            bits = bits_of.get(chain.identity)
            if bits is not None and len(expected) < self._most_names:
                names = list(split_names(chain.names))
                known = {name: expected[name] | bits for name in names if name in expected} if expected else {}
                expected.update(dict.fromkeys(names, bits))
                expected.update(known)

    def match(self, chains: Iterable[PrefixChain]) -> dict[WorkerId, int]:
        """Return the leading tokens whose KV each worker holds; workers without any are left out."""
        self._forget_expected()
        found: dict[WorkerId, int] = {}
        names_of = {chain.identity: chain.names for chain in chains}
        for (identity, stride), worker_of in self._workers_of.items():
            names = names_of.get(identity)
            if names and worker_of:
                self._walk(names, stride, worker_of, found)
        return found

    def _walk(self, names: bytes, stride: int, worker_of: dict[int, WorkerId], found: dict[WorkerId, int]) -> None:
        alive = sum(worker_of)
        step = stride * NAME_BYTES
        holders, expected, long_expected = self._holders, self._expected, self._long_expected
        has_expected = bool(expected or long_expected)
        for count, end in enumerate(range(step, len(names) + 1, step)):
            name = names[end - NAME_BYTES : end]
            held = holders.get(name, 0)
            if has_expected:
                held |= expected.get(name, 0) | long_expected.get(name, 0)
            lost = alive & ~held
            if lost:
                self._note(lost, worker_of, count * stride * UNIT_TOKENS, found)
                alive &= held
                if not alive:
                    return
        self._note(alive, worker_of, len(names) // step * stride * UNIT_TOKENS, found)

    @staticmethod
    def _note(bits: int, worker_of: dict[int, WorkerId], num_tokens: int, found: dict[WorkerId, int]) -> None:
        while bits and num_tokens:
            bit = bits & -bits
            found[worker_of[bit]] = num_tokens
            bits ^= bit

    def _store(self, names: Iterable[PrefixHash], bit: int) -> None:
        holders = self._holders
        for name in names:
            holders[name] = holders.get(name, 0) | bit
        while len(holders) > self._most_names:
            del holders[next(iter(holders))]
            self.num_forgotten += 1

    def _clear(self, bit: int) -> None:
        for table in (self._holders, self._expected, self._long_expected):
            for name in [name for name, bits in table.items() if bits & bit]:
                left = table[name] & ~bit
                if left:
                    table[name] = left
                else:
                    del table[name]

    def _forget_expected(self) -> None:
        """Expectations live for one to two times EXPECTED_S: two tables take turns."""
        age_s = self._clock.now() - self._turn_time
        if age_s >= EXPECTED_S:
            self._long_expected = self._expected if age_s < 2 * EXPECTED_S else {}
            self._expected = {}
            self._turn_time = self._clock.now()
