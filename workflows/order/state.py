"""What is known of an order that is followed, and what to do next: pure, so that it can be read and tested.

An order that no listing of the broker shows was certainly never there only if (O3)
- nobody can submit it any more: its deadline has passed, and its worker is dead, or answers questions again,
  which it does not do while it submits;
- a while has passed since: `absent_after`, more when the worker lives on;
- two complete listings of what was there after that while lack it, by a broker that tells up to when its
  listings are current and that they leave nothing out.
Everything else that leads nowhere is told to a person, and followed on: what heals by itself, heals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from workflows.entity import known_fields
from workflows.order.messages import FollowSettings, VerificationFinding, Verified

#: Complete listings that have to lack an order.
LISTINGS = 2
#: Seconds between two looks at an order that a person was told of.
ATTENDED_PAUSE = 300.0
#: Lines of the story that are kept: all that is new, not every look.
STORY_LINES = 20
#: States in which the broker has not been heard of.
UNCONFIRMED = frozenset({"accepted", "queued", "submitting", "unknown", "needs_attention"})


class OrderStep(StrEnum):
    END = "end"
    SETTLE = "settle"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class FollowedOrder:
    """What one order's workflow knows between two looks."""

    looks: int = 0
    state: str = ""
    finding: str = ""
    #: Looks since something changed, for the pause.
    unchanged: int = 0
    #: Complete listings in a row that lacked it, after nobody could submit it any more, and since when.
    missing: int = 0
    missing_since: float = 0.0
    certain: bool = False
    dead: bool = False
    #: Since when nobody could submit it, and so much later as the listing was behind.
    quiet_since: float = 0.0
    #: Since when the broker could not be asked; 0: it could.
    unasked_since: float = 0.0
    why_unasked: str = ""
    #: What a person was told.
    attention: str = ""
    story: tuple[str, ...] = ()

    @classmethod
    def carried(cls, known: dict[str, Any]) -> FollowedOrder:
        given = known_fields(cls, known)
        return cls(**given | {"story": tuple(given.get("story", ()))})

    def after_check(self, seen: Verified, now: float, settings: FollowSettings) -> FollowedOrder:
        """After a look."""
        after = replace(self, looks=self.looks + 1, state=seen.state or self.state, finding=seen.finding)
        if seen.finding == VerificationFinding.UNASKED:
            why = f"{seen.code}: {seen.detail}"
            after = replace(after, unasked_since=self.unasked_since or now, why_unasked=why)
        else:
            after = replace(after, unasked_since=0.0, why_unasked="")
        if seen.finding == VerificationFinding.MISSING:
            after = after._missed(seen, now, settings)
        elif seen.finding == VerificationFinding.LISTED:
            after = replace(after, missing=0, missing_since=0.0)
        changed = (after.state, after.finding, after.why_unasked) != (
            self.state,
            self.finding,
            self.why_unasked,
        )
        if not changed:
            return replace(after, unchanged=self.unchanged + 1)
        line = f"look {after.looks}: {after.finding}, {after.state}"
        if after.why_unasked:
            line += f" ({after.why_unasked})"
        return replace(after, unchanged=0, story=(*self.story, line)[-STORY_LINES:])

    def _missed(self, seen: Verified, now: float, settings: FollowSettings) -> FollowedOrder:
        if not seen.complete:
            return self
        wait = settings.absent_after if seen.dead else settings.absent_after_alive
        quiet_since = seen.quiet_since + seen.behind
        known = replace(self, certain=seen.certain, dead=seen.dead, quiet_since=quiet_since)
        since = self.missing_since or now
        if now < quiet_since + wait:
            # It may still come, or be there unseen: only listings of what was there after that count.
            return replace(known, missing=0, missing_since=since)
        # A listing that proves something does not count together with one that proves nothing.
        before = self.missing if self.certain == seen.certain else 0
        return replace(known, missing=before + 1, missing_since=since)

    def step(self, now: float, day_end: float) -> OrderStep:
        if self.finding in (VerificationFinding.FINAL, VerificationFinding.GONE):
            return OrderStep.END
        if self.missing >= LISTINGS and self.certain and self.state in UNCONFIRMED:
            return OrderStep.SETTLE
        # At the day's end a person has been told before: see `concern`.
        return OrderStep.END if now >= day_end and self.attention else OrderStep.WAIT

    def concern(self, now: float, day_end: float, settings: FollowSettings) -> str:
        """Why a person has to look at it now; empty: nobody has to."""
        if now >= day_end:
            return "its trading day has ended, and it is not known how the order did"
        if self.missing >= LISTINGS and self.certain and self.state not in UNCONFIRMED:
            return f"the broker had it ({self.state}), and does not list it any more"
        if self.missing >= LISTINGS and not self.certain and self.state in UNCONFIRMED:
            return "the broker does not list it, which does not prove here that it was never there"
        if self.unasked_since and now - self.unasked_since >= settings.patience:
            return f"the broker could not be asked for {settings.patience:.0f} s: {self.why_unasked}"
        return ""

    def with_attention(self, concern: str) -> FollowedOrder:
        return replace(self, attention=concern)

    def full_story(self, concern: str) -> str:
        return "; ".join((concern, *self.story))

    def pause(self, now: float, day_end: float, settings: FollowSettings) -> float:
        """Seconds until the next look."""
        longest = ATTENDED_PAUSE if self.attention else settings.longest_pause
        pause = min(settings.first_pause * 2.0 ** min(self.unchanged, 16), longest)
        if self.missing_since and self.state in UNCONFIRMED and not self.attention:
            # Not long after the listings begin to count: an unknown order blocks others.
            wait = settings.absent_after if self.dead else settings.absent_after_alive
            pause = min(pause, max(self.quiet_since + wait - now, settings.first_pause))
        return max(0.0, min(pause, day_end - now)) if now < day_end else settings.first_pause

    def rechecked(self) -> FollowedOrder:
        """A person wants to know: as after a change."""
        return replace(self, unchanged=0, attention="")
