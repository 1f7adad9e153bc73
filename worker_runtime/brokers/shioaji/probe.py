"""What `berth broker check` reads and sends past the broker port:
the SDK's own fields, without ids."""

import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from worker_runtime.brokers.shioaji import mapping, sdk
from worker_runtime.brokers.shioaji.broker import ShioajiBroker
from worker_runtime.protocol.errors import OrderRejected

#: Fields of a trade that say how it stands.
#: None names the person, the account or the broker's branch.
_ORDER = (
    "action",
    "price",
    "quantity",
    "price_type",
    "time_in_force",
    "order_lot",
    "order_cond",
    "octype",
)
_STATUS = (
    "status",
    "status_code",
    "order_quantity",
    "deal_quantity",
    "cancel_quantity",
    "modified_price",
    "msg",
)


#: Fields of events that say what happened. None names the person, the account or the branch.
_OPERATION = ("op_type", "op_code")
_EVENT_STATUS = ("order_quantity", "modified_price", "cancel_quantity")
_EVENT_DEAL = ("quantity", "price")


def shown_event(kind: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an event of the SDK says, without ids."""
    operation, order = event.get("operation") or {}, event.get("order") or {}
    shown = {"kind": kind} | {name: operation[name] for name in _OPERATION if name in operation}
    shown |= {f"order.{name}": order[name] for name in _EVENT_DEAL if name in order}
    status = event.get("status") or {}
    shown |= {f"status.{name}": status[name] for name in _EVENT_STATUS if name in status}
    return shown | {name: event[name] for name in _EVENT_DEAL if name in event}


class ShioajiProbe:
    """Looks into one logged-in session."""

    def __init__(self, broker: ShioajiBroker) -> None:
        self._broker = broker
        self._api, self._account, self._sdk = broker.native()

    @property
    def version(self) -> str:
        return str(self._sdk.__version__)

    @property
    def is_signed(self) -> bool:
        return bool(self._account.signed)

    def connections(self, timeout: float) -> int:
        return int(self._api.usage(timeout=sdk.to_milliseconds(timeout)).connections)

    def certificate_days(self, person_id: str) -> float:
        """Days until the active certificate expires; negative when it has."""
        _, ends = mapping.end_of(self._api.get_ca_expiretime(person_id or self._account.person_id))
        return (ends - time.time()) / 86_400

    def cache_health(self) -> tuple[str, list[str]]:
        health = self._api.trade_cache_health(self._account)
        return health.state.value, sorted({reason.reason.value for reason in health.reasons})

    def contract(self, symbol: str) -> str:
        """Returns the code of the contract that an order for this symbol names. Raises
        `OrderRejected`."""
        return str(self._find_contract(symbol).code)

    def limit_down(self, symbol: str) -> Decimal | None:
        """Returns the lowest price of the day; None if the contract's info does not say it."""
        try:
            info = self._api.contracts.info(self._find_contract(symbol))
            return mapping.price_of(info.limit_down) if info.limit_down else None
        except (AttributeError, TypeError):
            return None

    def show(self, broker_order_id: str, timeout: float) -> dict[str, Any]:
        """Returns the SDK's fields of an order, read anew."""
        trade = self._find(broker_order_id, timeout)
        shown = {f"order.{name}": getattr(trade.order, name, None) for name in _ORDER}
        shown |= {f"status.{name}": getattr(trade.status, name, None) for name in _STATUS}
        plain = {name: self._broker.blanked(value) for name, value in shown.items()}
        deals = [{"quantity": deal.quantity, "price": deal.price} for deal in trade.status.deals]
        return {**plain, "status.deals": deals}

    def send_quantity(self, broker_order_id: str, qty: int, timeout: float) -> None:
        """Sends this number as the SDK's `qty`, whatever it means."""
        trade = self._find(broker_order_id, timeout)
        self._api.update_order(trade, qty=qty, timeout=sdk.to_milliseconds(timeout))

    def _find(self, broker_order_id: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        trade = sdk.find_trade(self._api, self._account, broker_order_id, deadline, fresh=True)
        if trade is None:
            raise OrderRejected(f"no order {broker_order_id}")
        return trade

    def _find_contract(self, symbol: str) -> Any:
        return sdk.find_contract(self._api, self._broker.broker_type, symbol)
