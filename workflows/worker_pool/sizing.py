"""How many free workers a pool wants now, why, and until when: plain numbers, no clock and no I/O.

wanted = max(target that holds now, claims of the last minutes) + buffer,
         not below the minimum, not above the maximum, and never beyond the limit in all
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workflows.worker_pool.messages import WindowNow
from workflows.worker_pool.policy import PoolPolicy


@dataclass(frozen=True, kw_only=True)
class SizingInput:
    """What the sizing looks at."""

    #: Workers of the pool that belong to users, or are about to.
    in_use: int = 0
    #: Claims within the policy's last minutes.
    claims: int = 0
    window: WindowNow = field(default_factory=WindowNow)


@dataclass(frozen=True, kw_only=True)
class PoolSizing:
    wanted: int
    #: In plain words, one step of the sum each.
    reasons: tuple[str, ...]
    #: Unix seconds at which a window begins or ends; None: no window will.
    until: float | None


def size_pool(policy: PoolPolicy, now: SizingInput) -> PoolSizing:
    """Never fails: a policy was checked before it was taken."""
    target, why = _target(policy, now.window)
    wanted, reasons = target, [why]
    if policy.demand_minutes > 0:
        reasons.append(f"{now.claims} claims within the last {policy.demand_minutes:g} min")
        if now.claims > wanted:
            wanted = now.claims
            reasons.append(f"as many again are kept: {wanted}")
    buffer = policy.buffer_of(now.in_use)
    if buffer:
        wanted += buffer
        of_use = f" ({policy.buffer} of {now.in_use} in use)" if policy.buffer.endswith("%") else ""
        reasons.append(f"buffer{of_use}: {buffer} more, {wanted}")
    if wanted < policy.minimum:
        wanted = policy.minimum
        reasons.append(f"not below the minimum: {wanted}")
    if policy.maximum is not None and wanted > policy.maximum:
        wanted = policy.maximum
        reasons.append(f"not above the maximum: {wanted}")
    if policy.limit is not None:
        room = max(0, policy.limit - now.in_use)
        if wanted > room:
            wanted = room
            reasons.append(f"limit of {policy.limit} in all, {now.in_use} in use: {wanted}")
    return PoolSizing(wanted=wanted, reasons=tuple(reasons), until=now.window.until)


def _target(policy: PoolPolicy, now: WindowNow) -> tuple[int, str]:
    """A window that was looked at under an earlier policy counts no more."""
    window = next((one for one in policy.windows if one.name == now.name), None)
    if now.name and window is not None:
        return window.target, f"window {window.name}: {window.target} instead of {policy.target}"
    return policy.target, f"target: {policy.target}"
