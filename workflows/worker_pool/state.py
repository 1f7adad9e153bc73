"""The state of a pool: its wanted size, its counts and launches, and how it is shown.

Plain data, without clock and I/O. Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workflows.rollout.messages import Release
from workflows.worker_pool.messages import PoolCount, PoolFigures, PoolMode, PoolView, WindowNow
from workflows.worker_pool.policy import PoolPolicy

#: Seconds between two launches while they fail: 1, 2, 4 … up to this.
MAX_BACKOFF_S = 60.0
#: Most launches under way: far below Temporal's 2,000 pending activities.
MAX_LAUNCHES_IN_FLIGHT = 100
#: Rounds of failing launches after which they are logged, once for a whole episode.
FAILURES_UNTIL_REPORT = 3
#: Rounds in a row in which no worker became ready, after which refilling stops (the circuit opens):
#: with the backoff between them that is a bad image, not a slow host. A round is one launch once
#: they fail.
FAILURES_UNTIL_OPEN = 5
#: Seconds until one launch is tried while the circuit is open.
PROBE_INTERVAL_S = 600.0
#: Seconds until the next count while workers are starting that no launch waits for.
STARTING_COUNT_INTERVAL_S = 10.0


def size_pool(policy: PoolPolicy, now: PoolCount) -> tuple[int, tuple[str, ...]]:
    """Returns the wanted number of free workers, and a reason for each step of the sum.

    wanted = max(target that applies now, recent claims) + buffer, not below the minimum, not above
    the maximum, and never beyond the limit of all workers. Never fails: the policy was checked
    before.
    """
    size, why = _target(policy, now.window)
    reasons = [why]
    if policy.demand_minutes > 0:
        claims = now.claims or 0
        reasons.append(f"{claims} claims within the last {policy.demand_minutes:g} min")
        if claims > size:
            size = claims
            reasons.append(f"as many again are kept: {size}")
    buffer = policy.buffer_of(now.in_use)
    if buffer:
        size += buffer
        of_use = f" ({policy.buffer} of {now.in_use} in use)" if policy.buffer.endswith("%") else ""
        reasons.append(f"buffer{of_use}: {buffer} more, {size}")
    if size < policy.minimum:
        size = policy.minimum
        reasons.append(f"not below the minimum: {size}")
    if policy.maximum is not None and size > policy.maximum:
        size = policy.maximum
        reasons.append(f"not above the maximum: {size}")
    if policy.limit is not None:
        room = max(0, policy.limit - now.in_use)
        if size > room:
            size = room
            reasons.append(f"limit of {policy.limit} in all, {now.in_use} in use: {size}")
    return size, tuple(reasons)


def _target(policy: PoolPolicy, now: WindowNow) -> tuple[int, str]:
    """Returns the target and its reason. A window of an earlier policy does not count."""
    window = next((candidate for candidate in policy.windows if candidate.name == now.name), None)
    if now.name and window is not None:
        return window.target, f"window {window.name}: {window.target} instead of {policy.target}"
    return policy.target, f"target: {policy.target}"


@dataclass(frozen=True, kw_only=True)
class PoolState(PoolFigures):
    """Carried from run to run: a field may be added with a default, and none may change its
    meaning."""

    #: By an operator: the pool is emptied.
    draining: bool = False
    #: Number of the next launch: with the first run's id it makes a token.
    number: int = 0
    #: Unix seconds at which a window begins or ends; None: no window will.
    until: float | None = None
    #: Since when there are too many free workers; None: there are not.
    surplus_since: float | None = None
    #: The policy changed since the last count: a surplus is stopped at once.
    resized: bool = False
    #: The episode of failures was logged.
    failures_reported: bool = False
    #: Nothing is launched before.
    not_before: float = 0.0
    #: Tokens of launches whose outcome is unknown: each is launched again before any new one, and
    #: counts as under way meanwhile (exact-pool).
    unsettled: tuple[str, ...] = ()
    #: The version and image of new workers; empty: what the settings say.
    version: str = ""
    image: str = ""
    #: Version and image of the last release of which a worker became ready; None: not known.
    good_release: tuple[str, str] | None = None
    #: Number of the last change of what PostgreSQL keeps of the pool (`KeptPool`).
    kept_number: int = 0
    #: Takes the place of the run's id in tokens; empty: the run was never reset.
    token_base: str = ""

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
        return self.never_ready >= FAILURES_UNTIL_OPEN

    # --- changes ----------------------------------------------------------------------------------

    def counted(self, count: PoolCount, policy: PoolPolicy) -> PoolState:
        claims = self.claims if count.claims is None else count.claims
        size, reasons = size_pool(policy, replace(count, claims=claims))
        if self.draining:
            size, reasons = 0, ("the pool is being drained",)
        return replace(
            self,
            ready=count.ready,
            starting=count.starting,
            in_use=count.in_use,
            claims=claims,
            wanted=size,
            reasons=reasons,
            until=count.window.until,
        )

    def launched(self, release: Release) -> PoolState:
        """Records that a worker of this release became ready."""
        good = (release.version, release.image)
        return replace(self.without_failures(), launches=self.launches + 1, good_release=good)

    def failed(self, why: str, now: float, *, seen: int, never_ready: bool = False) -> PoolState:
        """Records that a launch failed; `seen` is `failing` when it began."""
        failing = max(self.failing, seen + 1)
        never_ready_rounds = self.never_ready
        if never_ready and (failing > self.failing or not never_ready_rounds):
            never_ready_rounds += 1
        pause = min(2.0 ** min(failing - 1, 10), MAX_BACKOFF_S)
        if never_ready_rounds >= FAILURES_UNTIL_OPEN:
            pause = PROBE_INTERVAL_S
        return replace(
            self,
            failures=self.failures + 1,
            failing=failing,
            never_ready=never_ready_rounds,
            not_before=now + pause,
            last_failure=why,
        )

    def with_release(self, release: Release, surge: int) -> PoolState:
        """Sets the release of new workers; earlier failures do not count against it."""
        same = release == self.release
        # Before the first successful launch, the present release counts as good.
        good = self.good_release or (self.version, self.image)
        state = replace(self, version=release.version, image=release.image, surge=max(surge, 0))
        return state if same else replace(state.without_failures(), good_release=good)

    def without_failures(self) -> PoolState:
        """Forgets the failures, so that launches begin at once."""
        return replace(self, failing=0, never_ready=0, not_before=0.0, failures_reported=False)

    def with_surplus(self, now: float) -> PoolState:
        return self if self.surplus_since is not None else replace(self, surplus_since=now)

    # --- decisions --------------------------------------------------------------------------------

    def gap(self, in_flight: int) -> int:
        """Returns how many workers to launch now; if negative, the surplus."""
        surge = 0 if self.draining else self.surge
        return self.wanted + surge - self.ready - self.starting - in_flight

    def launches_allowed(self, in_flight: int, now: float) -> int:
        """Returns how many launches may begin now: one at a time while they fail, none during the
        backoff."""
        if not self.failing:
            return MAX_LAUNCHES_IN_FLIGHT - in_flight
        return 0 if in_flight or now < self.not_before else 1

    def seconds_until_count(self, now: float, *, in_flight: int, period: float) -> float:
        """Returns the seconds until the next count when nothing is signalled; at most `period`."""
        waits = [period]
        if self.until is not None:
            waits.append(max(self.until - now, 0.1))
        if self.starting:
            waits.append(STARTING_COUNT_INTERVAL_S)
        if self.failing and not in_flight and self.mode is PoolMode.RUNNING and self.gap(0) > 0:
            waits.append(max(self.not_before - now, 0.1))
        return min(waits)


def pool_details(shown: PoolView) -> str:
    """Returns the details of a pool, in Markdown."""
    text = f"### {shown.ready} of {shown.wanted} workers ready, {shown.starting} starting"
    text += "".join(f"\n- {reason}" for reason in shown.reasons)
    if shown.mode == PoolMode.PAUSED:
        text += "\n\n**Paused** by an operator: nothing is launched until the pool is resumed."
    elif shown.mode == PoolMode.DRAINING:
        text += (
            "\n\n**Drained** by an operator: free workers are stopped until the pool is resumed."
        )
    if shown.circuit_open:
        text += f"\n\n**Refilling has stopped**: no worker becomes ready. {shown.last_failure}"
    elif shown.failing:
        text += f"\n\n**Launches fail** ({shown.failing} in a row): {shown.last_failure}"
    return text
