"""The state of an order that is followed, and what to do next.

An order that the broker does not list certainly never reached it only if all of this holds:
- nobody can submit it any more: its deadline has passed, and its worker is dead, or answers queries
  again, which it does not do while it submits;
- `absent_after` seconds have passed since, more if the worker is alive;
- two complete listings after that lack the order, of a broker that says up to when its listings are
  current and that they leave nothing out.
For everything else that makes no progress a person is asked, and the order is followed on: it may
settle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from workflows.order.messages import FollowSettings, VerificationFinding, Verified

#: Complete listings that have to lack an order.
MIN_LISTINGS_WITHOUT_ORDER = 2
#: Seconds between two verifications of an order that is on the list for a person.
ATTENDED_CHECK_INTERVAL_S = 300.0
#: Lines of the story that are kept: changes, not every verification.
MAX_STORY_LINES = 20
#: States in which the broker has not confirmed the order.
UNCONFIRMED_STATES = frozenset({"accepted", "queued", "submitting", "unknown", "needs_attention"})

#: The fields that the story tells of.
_news = attrgetter("state", "finding", "why_unasked")

#: The words in which people read what a verification found.
_FOUND: dict[str, str] = {
    VerificationFinding.LISTED: "the broker lists it",
    VerificationFinding.MISSING: "the broker does not list it",
    VerificationFinding.UNASKED: "the broker could not be asked",
}


class OrderStep(StrEnum):
    END = "end"
    SETTLE = "settle"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class FollowedOrder:
    """Holds what an order's workflow knows between two verifications."""

    checks: int = 0
    state: str = ""
    finding: str = ""
    #: Verifications since the last change, for the pause.
    unchanged: int = 0
    #: Complete listings in a row that lacked it, after nobody could submit it any more, and since
    #: when.
    missing: int = 0
    missing_since: float = 0.0
    certain: bool = False
    dead: bool = False
    #: Since when nobody could submit it, plus the lag of the listing.
    quiet_since: float = 0.0
    #: Since when the broker could not be asked; 0: it could.
    unasked_since: float = 0.0
    why_unasked: str = ""
    #: Why it is on the list for a person; empty: it is not.
    attention: str = ""
    story: tuple[str, ...] = ()

    def after_check(self, seen: Verified, now: float, settings: FollowSettings) -> FollowedOrder:
        after = replace(
            self, checks=self.checks + 1, state=seen.state or self.state, finding=seen.finding
        )
        if seen.finding == VerificationFinding.UNASKED:
            why = f"{seen.code}: {seen.detail}"
            after = replace(after, unasked_since=self.unasked_since or now, why_unasked=why)
        else:
            after = replace(after, unasked_since=0.0, why_unasked="")
        if seen.finding == VerificationFinding.MISSING:
            after = after._missed(seen, now, settings)
        elif seen.finding == VerificationFinding.LISTED:
            after = replace(after, missing=0, missing_since=0.0)
        if _news(after) == _news(self):
            return replace(after, unchanged=self.unchanged + 1)
        line = f"check {after.checks}: {_FOUND.get(after.finding, after.finding)}"
        line += f" ({after.why_unasked})" if after.why_unasked else ""
        line += f", and the order is {after.state}"
        return replace(after, unchanged=0, story=(*self.story, line)[-MAX_STORY_LINES:])

    def _missed(self, seen: Verified, now: float, settings: FollowSettings) -> FollowedOrder:
        if not seen.complete:
            return self
        wait = settings.absent_after if seen.dead else settings.absent_after_alive
        quiet_since = seen.quiet_since + seen.behind
        known = replace(self, certain=seen.certain, dead=seen.dead, quiet_since=quiet_since)
        since = self.missing_since or now
        if now < quiet_since + wait:
            # It may still come, or be there and not listed yet: only later listings count.
            return replace(known, missing=0, missing_since=since)
        # A listing that proves something does not count together with one that proves nothing.
        before = self.missing if self.certain == seen.certain else 0
        return replace(known, missing=before + 1, missing_since=since)

    def step(self, now: float, day_end: float) -> OrderStep:
        if self.finding in (VerificationFinding.FINAL, VerificationFinding.GONE):
            return OrderStep.END
        if (
            self.missing >= MIN_LISTINGS_WITHOUT_ORDER
            and self.certain
            and self.state in UNCONFIRMED_STATES
        ):
            return OrderStep.SETTLE
        # At the day's end it is on the list for a person: see `concern`.
        return OrderStep.END if now >= day_end and self.attention else OrderStep.WAIT

    def concern(self, now: float, day_end: float, settings: FollowSettings) -> str:
        """Returns why an operator has to look at the order now; empty if nobody has to."""
        if now >= day_end:
            return "its trading day has ended, and it is not known how the order did"
        if (
            self.missing >= MIN_LISTINGS_WITHOUT_ORDER
            and self.certain
            and self.state not in UNCONFIRMED_STATES
        ):
            return f"the broker had it ({self.state}), and does not list it any more"
        if (
            self.missing >= MIN_LISTINGS_WITHOUT_ORDER
            and not self.certain
            and self.state in UNCONFIRMED_STATES
        ):
            return "the broker does not list it, which does not prove here that it was never there"
        if self.unasked_since and now - self.unasked_since >= settings.patience:
            return (
                f"the broker could not be asked for {settings.patience:.0f} s: {self.why_unasked}"
            )
        return ""

    def full_story(self, concern: str) -> str:
        return "; ".join((concern, *self.story))

    def pause(self, now: float, day_end: float, settings: FollowSettings) -> float:
        """Returns the seconds until the next verification."""
        longest = ATTENDED_CHECK_INTERVAL_S if self.attention else settings.longest_pause
        pause = min(settings.first_pause * 2.0 ** min(self.unchanged, 16), longest)
        if self.missing_since and self.state in UNCONFIRMED_STATES and not self.attention:
            # Soon after the listings begin to count, because an unknown order blocks others.
            wait = settings.absent_after if self.dead else settings.absent_after_alive
            pause = min(pause, max(self.quiet_since + wait - now, settings.first_pause))
        return max(0.0, min(pause, day_end - now)) if now < day_end else settings.first_pause

    def rechecked(self) -> FollowedOrder:
        """Returns the order to be verified soon, as after a change, because an operator asked."""
        return replace(self, unchanged=0, attention="")
