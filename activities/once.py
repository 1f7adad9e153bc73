"""Saying a thing once: an unknown sender may repeat itself for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

#: Things remembered: with short ids about 100 kB.
KEPT = 1000


class Once:
    """Remembers the last `kept` things that were said."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._said: OrderedDict[Hashable, None] = OrderedDict()

    def new(self, thing: Hashable) -> bool:
        """Whether `thing` has not been said of late; from now on it has."""
        new = thing not in self._said
        self._said[thing] = None
        self._said.move_to_end(thing)
        if len(self._said) > self._kept:
            self._said.popitem(last=False)
        return new
