"""Puts an order that has to wait for its broker back into its queue, ahead of all that came after it.

Nothing of the order was begun, so it is not refused. Until its deadline it stays in Valkey, where it can be
cancelled, halted or taken by another worker, and the account's next session executes it. Control messages are
served meanwhile.
"""

from __future__ import annotations

from worker_runtime.process.clock import seconds_until
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.session.queue_reader import QueueItem, RequestQueueReader
from worker_runtime.trading.broker_sessions import BrokerSessions


class PostponedOrder:
    """The user's first order in the queue, if it waits. While it is `on`, requests stay in the queue."""

    def __init__(self, queue_reader: RequestQueueReader, broker_sessions: BrokerSessions, log: Log) -> None:
        self._queue_reader = queue_reader
        self._broker_sessions = broker_sessions
        self._log = log
        self._account_id = ""
        self._deadline_ns: int | None = None
        #: What is still to be put back.
        self._item: tuple[bytes, str] | None = None

    @property
    def on(self) -> bool:
        return self._deadline_ns is not None

    def hold(self, order: PlaceOrder, item: QueueItem) -> None:
        """Postpones a popped order. Call `put_back` before the next pop."""
        self._account_id = order.account_id
        self._deadline_ns = item.deadline_ns
        self._item = item.raw, order.order_id

    def put_back(self) -> bytes | None:
        """Returns the order to its queue, if that is still due. Returns the raw item if it can only be
        answered. Raises `ValkeyFailed`; then call again."""
        if self._item is None:
            return None
        item, order_id = self._item
        became = self._queue_reader.put_back(item, order_id)
        self._item = None
        if became == "queued":
            return None
        self._log.warning("order_not_put_back", order_id=order_id, became=became)
        self._deadline_ns = None
        return item if became == "left" else None

    def ended(self) -> bool:
        """True once when the wait is over: there is a session or will be none, orders of another account come
        first, or the deadline has passed."""
        if self._deadline_ns is None or self.left() > 0:
            return False
        self._deadline_ns = None
        return True

    def left(self) -> float:
        """Seconds until the wait is over, if nothing changes."""
        broker_sessions = self._broker_sessions
        if self._deadline_ns is None:
            return 0.0
        account_id = self._account_id
        if broker_sessions.is_ready(account_id) or broker_sessions.is_refused(account_id):
            return 0.0
        if broker_sessions.has_other_session(account_id):
            return 0.0
        return max(0.0, seconds_until(self._deadline_ns))

    def close(self) -> None:
        """Puts the order back before the session ends."""
        try:
            self.put_back()
        except ValkeyFailed as error:
            self._log.warning("order_not_put_back", code=error.code)
