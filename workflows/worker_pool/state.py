"""What a pool knows between two looks, as plain data: its counts, its launches and how they fare.

No Temporal here: the workflow asks this class what a change means. Times are Unix seconds.

How a pool shows itself: the answer of its query, and the page in Temporal's web UI.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workflows.entity import known_fields
from workflows.rollout.messages import Release
from workflows.worker_pool.messages import PoolCount, PoolMode, PoolView
from workflows.worker_pool.policy import PoolPolicy
from workflows.worker_pool.sizing import PoolSizing

#: Seconds between two launches while they fail: 1, 2, 4 … up to this.
BACKOFF_MAX = 60.0
#: Launches under way at most: a hundred fit well below Temporal's 2,000 pending activities.
IN_FLIGHT_MAX = 100
#: Rounds of failing launches after which it is told, once for the whole episode: one failure is a hiccup.
REPORT_AFTER = 3
#: Rounds in a row in which no worker became ready, after which refilling stops (the circuit opens): with the
#: backoff between them that is a bad image, not a slow host. A round is one launch once they fail.
CIRCUIT_AFTER = 5
#: Seconds until one launch is tried while the circuit is open.
PROBE_PERIOD = 600.0
#: Seconds until the next look while workers are starting that no launch waits for.
SOON = 10.0


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """Goes from run to run: a field may be added with a default, and none may change its meaning."""

    #: An operator holds the pool as it is: nothing is launched and nobody leaves but by a claim.
    paused: bool = False
    #: An operator empties the pool.
    draining: bool = False
    #: Number of the next launch: with the first run's id it makes a token.
    number: int = 0
    ready: int = 0
    starting: int = 0
    in_use: int = 0
    claims: int = 0
    #: As of the last look.
    wanted: int = 0
    reasons: tuple[str, ...] = ()
    until: float | None = None
    #: Since when there are too many free workers; None: there are not.
    surplus_since: float | None = None
    launches: int = 0
    failures: int = 0
    #: Rounds of failures since the last launch that went well. Launches that run beside each other fail in
    #: one round: a restarted orchestrator takes a hundred of them along.
    failing: int = 0
    #: Those of them in which the worker never became ready.
    never_ready: int = 0
    #: The episode of failures was told.
    failures_reported: bool = False
    #: Before which nothing is launched.
    not_before: float = 0.0
    last_failure: str = ""
    #: Tokens of launches whose outcome is unknown: each is launched again before any new one, and counts
    #: as under way meanwhile (exact-pool).
    unsettled: tuple[str, ...] = ()
    #: Of new workers; empty: what the settings say.
    version: str = ""
    image: str = ""
    #: Version and image of the last release of which a worker became ready; None: not known.
    good_release: tuple[str, str] | None = None
    #: Free workers beyond what is wanted, while a rollout replaces others.
    surge: int = 0

    @classmethod
    def from_carried(cls, carried: Mapping[str, Any] | None) -> PoolState:
        """From the plain dict of the run before; JSON has made lists of its tuples."""
        known = known_fields(cls, carried)
        for name in ("reasons", "unsettled"):
            known[name] = tuple(known.get(name, ()))
        if known.get("good_release"):
            known["good_release"] = tuple(known["good_release"])
        return cls(**known)

    @property
    def release(self) -> Release:
        return Release(version=self.version, image=self.image)

    @property
    def good(self) -> Release | None:
        if self.good_release is None:
            return None
        version, image = self.good_release
        return Release(version=version, image=image)

    @property
    def mode(self) -> PoolMode:
        if self.draining:
            return PoolMode.DRAINING
        return PoolMode.PAUSED if self.paused else PoolMode.RUNNING

    @property
    def circuit_open(self) -> bool:
        return self.never_ready >= CIRCUIT_AFTER

    # --- what happens ---------------------------------------------------------------------------------

    def counted(self, count: PoolCount, sizing: PoolSizing) -> PoolState:
        return replace(
            self,
            ready=count.ready,
            starting=count.starting,
            in_use=count.in_use,
            claims=self.claims if count.claims is None else count.claims,
            wanted=0 if self.draining else sizing.wanted,
            reasons=("the pool is being drained",) if self.draining else sizing.reasons,
            until=sizing.until,
        )

    def launched(self, release: Release) -> PoolState:
        """One of this release became ready."""
        good = (release.version, release.image)
        return replace(self.without_failures(), launches=self.launches + 1, good_release=good)

    def failed(self, why: str, now: float, *, seen: int, never_ready: bool = False) -> PoolState:
        """`seen`: `failing` when this launch began."""
        failing = max(self.failing, seen + 1)
        never_ready_rounds = self.never_ready
        if never_ready and (failing > self.failing or not never_ready_rounds):
            never_ready_rounds += 1
        pause = min(2.0 ** min(failing - 1, 10), BACKOFF_MAX)
        if never_ready_rounds >= CIRCUIT_AFTER:
            pause = PROBE_PERIOD
        return replace(
            self,
            failures=self.failures + 1,
            failing=failing,
            never_ready=never_ready_rounds,
            not_before=now + pause,
            last_failure=why,
        )

    def with_release(self, release: Release, surge: int) -> PoolState:
        """New workers are of this release from now on; its launches are judged afresh."""
        same = release == self.release
        # Of a pool that has launched nothing since this is written down, the one before counts as good.
        good = self.good_release or (self.version, self.image)
        state = replace(self, version=release.version, image=release.image, surge=max(surge, 0))
        return state if same else replace(state.without_failures(), good_release=good)

    def without_failures(self) -> PoolState:
        """Something changed for the better: launches begin at once."""
        return replace(self, failing=0, never_ready=0, not_before=0.0, failures_reported=False)

    def with_surplus(self, now: float) -> PoolState:
        return self if self.surplus_since is not None else replace(self, surplus_since=now)

    # --- what it means --------------------------------------------------------------------------------

    def gap(self, in_flight: int) -> int:
        """How many to launch now; negative: how many there are too many."""
        surge = 0 if self.draining else self.surge
        return self.wanted + surge - self.ready - self.starting - in_flight

    def launches_allowed(self, in_flight: int, now: float) -> int:
        """How many launches may begin now: one at a time while they fail, none within the backoff."""
        if not self.failing:
            return IN_FLIGHT_MAX - in_flight
        return 0 if in_flight or now < self.not_before else 1

    def seconds_until_count(self, now: float, *, in_flight: int, period: float) -> float:
        """Seconds until the next look when nothing is signalled; `period` at the most."""
        waits = [period]
        if self.until is not None:
            waits.append(max(self.until - now, 0.1))
        if self.starting:
            waits.append(SOON)
        if self.failing and not in_flight and self.mode is PoolMode.RUNNING:
            waits.append(max(self.not_before - now, 0.1))
        return min(waits)


def pool_view(
    pool: str,
    state: PoolState,
    policy: PoolPolicy,
    *,
    in_flight: int,
    configured: PoolPolicy | None,
    revision: int,
) -> PoolView:
    return PoolView(
        pool=pool,
        target=policy.target,
        ready=state.ready,
        starting=state.starting + in_flight + len(state.unsettled),
        launches=state.launches,
        failures=state.failures,
        last_failure=state.last_failure,
        paused=state.paused,
        mode=state.mode,
        wanted=state.wanted,
        reasons=state.reasons,
        changes_at=state.until,
        in_use=state.in_use,
        claims=state.claims,
        failing=state.failing,
        circuit_open=state.circuit_open,
        next_launch=state.not_before or None,
        policy=policy,
        configured=configured,
        revision=revision,
        release=state.release,
        surge=state.surge,
        never_ready=state.never_ready,
        good=state.good,
    )


def pool_details(shown: PoolView) -> str:
    """Markdown."""
    text = f"### {shown.ready} of {shown.wanted} workers ready, {shown.starting} starting"
    text += "".join(f"\n- {reason}" for reason in shown.reasons)
    if shown.mode == PoolMode.PAUSED:
        text += "\n\n**Paused** by an operator: nothing is launched until the pool is resumed."
    elif shown.mode == PoolMode.DRAINING:
        text += "\n\n**Drained** by an operator: free workers are stopped until the pool is resumed."
    if shown.circuit_open:
        text += f"\n\n**Refilling has stopped**: no worker becomes ready. {shown.last_failure}"
    elif shown.failing:
        text += f"\n\n**Launches fail** ({shown.failing} in a row): {shown.last_failure}"
    return text
