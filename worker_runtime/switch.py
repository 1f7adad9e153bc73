"""Whether an order may be placed now. Only orders ask: cancels and queries pass every switch."""

from __future__ import annotations

from worker_runtime.protocol.errors import ReducingOnly, TradingHalted
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.protocol.switches import SwitchState, UserSwitch


def heed(switch: UserSwitch, order: PlaceOrder) -> None:
    """Raises `TradingHalted` or `ReducingOnly`."""
    state = switch.of(order.account_id)
    if state is SwitchState.HALTED:
        raise TradingHalted
    if state is SwitchState.REDUCING and not order.reduce_only:
        raise ReducingOnly
