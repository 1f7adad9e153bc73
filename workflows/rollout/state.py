"""The state of a rollout, and what to do next.

Free workers of other versions are ended only while there are more free workers than the pool wants,
so a rollout never takes a worker away from a claim. A version whose workers never become ready is
rolled back. Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workflows.entity import copied_fields
from workflows.rollout.messages import (
    ENDED,
    Release,
    ReleaseSnapshot,
    RolloutInput,
    RolloutPhase,
    RolloutView,
)

#: The phases in which free workers are replaced, each with the one that follows.
_REPLACING = {
    RolloutPhase.REPLACING: RolloutPhase.MOVING,
    RolloutPhase.ROLLING_BACK: RolloutPhase.MOVING_BACK,
}
_MOVING = {
    RolloutPhase.MOVING: RolloutPhase.DONE,
    RolloutPhase.MOVING_BACK: RolloutPhase.ROLLED_BACK,
}


@dataclass(frozen=True, kw_only=True)
class RolloutStep:
    """Says what to do after a check of the pool."""

    #: Free workers of other versions to end now.
    retire: int = 0
    #: Users are to be asked to move.
    move: bool = False


@dataclass(frozen=True, kw_only=True)
class RolloutState(RolloutView):
    """The view of a rollout, with the fields that only its workflow needs.

    Carried from run to run: a field may be added with a default.
    """

    phase: RolloutPhase = RolloutPhase.REPLACING
    #: The first round has found what the pool had before.
    known: bool = False
    surge: int = 0
    #: The canary failed; False when an operator took it back.
    condemned: bool = False
    #: Since when all users have moved without one being served; 0: some were, or some are to move.
    unproven_since: float = 0.0

    @classmethod
    def begun(cls, given: RolloutInput, now: float) -> RolloutState:
        return cls(
            pool=given.pool,
            release=given.release,
            began_at=now,
            deadline=now + given.deadline,
            surge=1,
        )

    @property
    def target(self) -> Release:
        """The release of new workers."""
        return self.before if self.going_back else self.release

    @property
    def going_back(self) -> bool:
        return self.phase in (
            RolloutPhase.ROLLING_BACK,
            RolloutPhase.MOVING_BACK,
            RolloutPhase.ROLLED_BACK,
        )

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    # --- changes ----------------------------------------------------------------------------------

    def rolled_back(self, reason: str, *, condemned: bool = False) -> RolloutState:
        """Puts the version before back, unless that was done already or the rollout has ended."""
        if self.ended or self.going_back:
            return self
        return replace(
            self, phase=RolloutPhase.ROLLING_BACK, reason=reason, surge=0, condemned=condemned
        )

    def after_check(
        self, seen: ReleaseSnapshot, given: RolloutInput
    ) -> tuple[RolloutState, RolloutStep]:
        """Returns the state after a check of the pool, and what to do. The first check comes before
        any change."""
        state = replace(
            self,
            new=seen.new,
            old=seen.old,
            users=seen.users,
            wanted=seen.wanted,
            held=_held_reason(seen),
        )
        if not self.known:  # the first check changes nothing, so that a repeat sees the same
            return replace(state, before=seen.before, known=True), RolloutStep()
        if not state.going_back and seen.never_ready >= given.failures:
            why = f"{seen.never_ready} times in a row no worker became ready: {seen.last_failure}"
            return state.rolled_back(why[:300], condemned=True), RolloutStep()
        if not state.going_back and seen.failed >= given.failures:
            why = f"{seen.failed} users in a row got a worker that did not serve them"
            return state.rolled_back(why, condemned=True), RolloutStep()
        if state.phase in _REPLACING:
            return state._replacing(seen, given)
        if state.phase in _MOVING:
            return state._moving(seen, given)
        return state, RolloutStep()

    def _replacing(
        self, seen: ReleaseSnapshot, given: RolloutInput
    ) -> tuple[RolloutState, RolloutStep]:
        # A pool whose old workers were all claimed proves nothing: a new one must be ready.
        if not seen.old and (seen.new or not seen.wanted):
            return replace(self, phase=_REPLACING[self.phase], surge=0), RolloutStep(
                move=bool(seen.users)
            )
        spare = max(seen.new + seen.old - seen.wanted, 0)
        retire = min(seen.old, spare, given.batch)
        # As many new workers must be ready, or the next claims would find an empty pool.
        if seen.wanted:
            retire = min(retire, seen.new)
        remaining = seen.old - retire
        state = replace(self, surge=min(given.batch, remaining) or int(not seen.new))
        return state, RolloutStep(retire=retire)

    def _moving(
        self, seen: ReleaseSnapshot, given: RolloutInput
    ) -> tuple[RolloutState, RolloutStep]:
        if seen.old:  # launched before the pool knew, and ready since
            back = RolloutPhase.ROLLING_BACK if self.going_back else RolloutPhase.REPLACING
            return replace(self, phase=back)._replacing(seen, given)
        if seen.users:
            return self, RolloutStep(move=True)
        since = self.unproven_since or seen.at
        unproven = seen.at and seen.wanted and not seen.served and not self.going_back
        if unproven and seen.at - since < given.proof:
            held = self.held or "no user was served by the new version yet"
            return replace(self, unproven_since=since, asked=0, held=held), RolloutStep()
        return replace(self, phase=_MOVING[self.phase], asked=0), RolloutStep()

    def view(self) -> RolloutView:
        return RolloutView(**copied_fields(self, RolloutView) | {"phase": str(self.phase)})


def _held_reason(seen: ReleaseSnapshot) -> str:
    if seen.failed:
        return f"{seen.failed} users in a row got a worker that did not serve them"
    if seen.mode != "running":
        return f"the pool is {seen.mode}: nothing is launched"
    if seen.last_failure and seen.never_ready:
        return seen.last_failure
    return ""
