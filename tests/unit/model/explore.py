"""Searches every interleaving, breadth first: the first violation has the shortest story."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.unit.model.moves import first, steps
from tests.unit.model.state import Rules, Violation, World


@dataclass(frozen=True)
class Explored:
    """Holds the number of different worlds, or the way to the first that breaks a property."""

    worlds: int
    violation: Violation | None = None
    story: tuple[str, ...] = ()


def explore(rules: Rules, *, limit: int = 1_000_000) -> Explored:
    """Visits all worlds that can be reached; stops at the first violation.

    Raises AssertionError when there are more than `limit` worlds: then nothing has been proven.
    """
    start = first(rules)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        world = waiting.popleft()
        for name, after in steps(world, rules):
            if isinstance(after, Violation):
                return Explored(len(came_from), after, (*_story(came_from, world), name))
            if after not in came_from:
                came_from[after] = (world, name)
                waiting.append(after)
        assert len(came_from) <= limit, "the bounds are too wide to be explored"
    return Explored(len(came_from))


def _story(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    names: list[str] = []
    while (before := came_from[world]) is not None:
        world, name = before
        names.append(name)
    return tuple(reversed(names))
