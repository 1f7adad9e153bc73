"""The orders that this worker has begun to submit, kept in shared memory (invariant *submit-once*).

A session process that died took its own memory with it. This list is the zygote's: the next session reads
in it what its predecessors may have sent, and never sends it again.
"""

from __future__ import annotations

import mmap
from collections import deque
from hashlib import blake2b

#: Bytes of a hash; with the list full, two orders share one with a chance of 2^-115.
_HASH = 16
#: Hashes kept. A busy day of one person has some hundreds of orders.
LIMIT = 8192
_COUNT = 8


class Submissions:
    """Hashes of the last `LIMIT` order ids. Made before the fork; written by the session alone.

    The memory is touched as it fills: 16 bytes an order, 128 KiB at the most.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._memory = mmap.mmap(-1, _COUNT + limit * _HASH, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self._count = memoryview(self._memory)[:_COUNT].cast("q")
        self._read = 0
        self._known: set[bytes] = set()
        self._order: deque[bytes] = deque()

    def note(self, order_id: str) -> None:
        """To be called before the broker is: from here on the order may have been sent."""
        count = self._count[0]
        start = _COUNT + count % self._limit * _HASH
        self._memory[start : start + _HASH] = _hash(order_id)
        self._count[0] = count + 1  # after the hash: what is counted is complete

    def __contains__(self, order_id: str) -> bool:
        """Whether this worker, in this session process or an earlier one, has begun to submit the order."""
        self._catch_up()
        return _hash(order_id) in self._known

    def _catch_up(self) -> None:
        count = self._count[0]
        for number in range(max(self._read, count - self._limit), count):
            start = _COUNT + number % self._limit * _HASH
            digest = self._memory[start : start + _HASH]
            self._order.append(digest)
            self._known.add(digest)
        self._read = count
        while len(self._order) > self._limit:
            self._known.discard(self._order.popleft())


def _hash(order_id: str) -> bytes:
    return blake2b(order_id.encode(), digest_size=_HASH).digest()
