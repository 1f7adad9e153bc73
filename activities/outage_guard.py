"""When maintenance must not do anything, whatever it has seen: its guard, without I/O.

Invariant *no-healthy-kill*: an outage looks like many dead workers. What was seen under a guard counts for
nothing, so that two looks in quiet times have to follow before anything is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.database.maintenance import Pass, Place

#: So many may be odd at once whatever their share, and from this share on it is an outage.
FEW = 3
MANY = 0.2
#: Seconds after which a pass is too old to be compared with.
OLD = 600.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look at all workers says of the world around them."""

    place: Place
    size: int
    anomalies: int
    in_service: int
    unmarked: int
    unlisted: int


def many(count: int, of: int) -> bool:
    return count > FEW and count >= MANY * of


def guarded(look: Look, before: Pass | None) -> str:
    """Why nothing may be done now; '': it may."""
    if not look.place.generation:
        return "the generation is missing"
    if before is None or before.age > OLD:
        return "the first pass in a while"
    if before.guarded and not before.place.generation:
        return "the pass before could not look"
    if look.place.generation != before.place.generation:
        return "the generation has changed"
    if look.place.server != before.place.server:
        return "Valkey was restarted"
    if many(before.place.tasks - look.place.tasks, before.place.tasks):
        return "the launcher lists far fewer tasks"
    if many(look.unlisted, look.size):
        return "the launcher does not list living workers"
    if many(look.unmarked, look.in_service):
        return "many marks are missing"
    if many(look.anomalies, look.size):
        return "too many anomalies at once"
    return ""
