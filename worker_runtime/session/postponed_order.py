"""The order that waits for its broker: back in its queue, with all that came behind it.

While the broker is away, nothing of an order has been begun. So it is not refused: until its deadline it
stays in Valkey, where it can be cancelled, halted, and taken on by another worker, and the account's next
session executes it. Control messages are served meanwhile.
"""

from __future__ import annotations

from worker_runtime.process.clock import seconds_until
from worker_runtime.process.log import Log
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.messages import PlaceOrder
from worker_runtime.session.queue_reader import QueueItem, RequestQueueReader
from worker_runtime.trading.broker_sessions import BrokerSessions


class PostponedOrder:
    """One user's first order in the queue. While it is `on`, requests are to be left in the queue."""

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
        """An order that was popped and cannot be begun; `put_back` has to follow before the next pop."""
        self._account_id = order.account_id
        self._deadline_ns = item.deadline_ns
        self._item = item.raw, order.order_id

    def put_back(self) -> bytes | None:
        """Returns it to its queue, if that is still to be done; the item itself if it can only be answered.
        Raises `ValkeyFailed`; then call again."""
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
        """True once when the wait is over: a session is there or will not come any more, another account's
        orders come first, or the order's time is up, so that it is answered."""
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
        """Before the session ends."""
        try:
            self.put_back()
        except ValkeyFailed as error:
            self._log.warning("order_not_put_back", code=error.code)
