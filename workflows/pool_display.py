"""How a pool shows itself: the answer of its query, and the page in Temporal's web UI."""

from __future__ import annotations

from workflows.pool_messages import PoolMode, PoolView
from workflows.pool_policy import PoolPolicy
from workflows.pool_state import PoolState


def view(
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


def details(shown: PoolView) -> str:
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
