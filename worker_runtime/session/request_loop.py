"""Serves one user: control messages first, then requests in order, and broker health in between."""

from collections import deque
from collections.abc import Sequence
from threading import get_ident

from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.process.clock import Backoff, wall_ms
from worker_runtime.process.replacement import WorkerExit
from worker_runtime.process.shared_state import Lease, WorkerActivity
from worker_runtime.process.valkey import ValkeyFailed
from worker_runtime.protocol.broker_reports import OrderChanged
from worker_runtime.protocol.launch import ExitCode
from worker_runtime.protocol.messages import PlaceOrder, WorkerEventKind
from worker_runtime.session.control import ControlHandler, SessionParts
from worker_runtime.session.queue_reader import PostponedOrder, RequestQueueReader
from worker_runtime.session.request_handler import RequestHandler
from worker_runtime.trading.account_lister import AccountLister
from worker_runtime.trading.account_session import OpenedAccount
from worker_runtime.trading.broker_calls import BrokerCalls
from worker_runtime.trading.broker_pauses import BrokerPauses
from worker_runtime.trading.broker_sessions import BrokerSessions
from worker_runtime.trading.health import HealthMonitor
from worker_runtime.trading.instrument_lists import InstrumentReader
from worker_runtime.trading.login_attempts import LoginAttempts
from worker_runtime.trading.order_changer import OrderChanger
from worker_runtime.trading.order_submitter import OrderPostponed, OrderSubmitter, UnknownOutcomes
from worker_runtime.trading.order_tracker import OrderTracker
from worker_runtime.trading.queue_item import QueueItem
from worker_runtime.trading.rate_limiter import SharedRateLimiter
from worker_runtime.trading.reconciliation import AccountReader, AccountReconciler
from worker_runtime.trading.session_recovery import SessionRecovery


def _build_request_handler(
    parts: SessionParts,
    broker_calls: BrokerCalls,
    broker_sessions: BrokerSessions,
    tracker: OrderTracker,
    unknown_outcomes: UnknownOutcomes,
    instruments: InstrumentReader,
) -> RequestHandler:
    """Returns the handler of a user's requests, wired to the readers and writers of orders."""
    send_buffer, shared_state, log = parts.send_buffer, parts.shared_state, parts.log
    submitter = OrderSubmitter(
        broker_calls,
        tracker,
        unknown_outcomes,
        send_buffer=send_buffer,
        shared_state=shared_state,
        log=log,
    )
    return RequestHandler(
        submitter,
        OrderChanger(broker_calls, tracker, send_buffer),
        AccountReader(broker_calls, tracker),
        instruments,
        broker_sessions=broker_sessions,
        send_buffer=send_buffer,
        shared_state=shared_state,
        log=log,
        add_measures=broker_calls.add_measures,
    )


class RequestLoop:
    """Serves one user after the claim. The session's loop calls `step` after each event."""

    def __init__(self, parts: SessionParts) -> None:
        self._config, self._stopping, self._wake = parts.config, parts.stopping, parts.wake
        config, shared_state, log = parts.config, parts.shared_state, parts.log
        send_buffer = parts.send_buffer
        self._shared_state, self._send_buffer, self._log = shared_state, send_buffer, log
        self._lease = Lease(shared_state)
        #: The session's thread, which applies the changes.
        self._thread = get_ident()
        self._changes: deque[tuple[ConnectionKey, OrderChanged]] = deque()
        self._queue_reader = RequestQueueReader(parts.client, shared_state, config.worker_id, log)
        self._tracker = OrderTracker(shared_state.epoch, send_buffer.add_event, log)
        self._unknown_outcomes = UnknownOutcomes(self._tracker)
        self.health = HealthMonitor(shared_state, send_buffer.add_worker_event)
        rate_limiter = SharedRateLimiter(parts.client, config, shared_state, log)
        attempts = LoginAttempts(
            parts.load_brokers,
            client=f"{config.worker_id}/{shared_state.epoch}",
            lease=self._lease,
            on_order=self._on_order_changed,
            wake=parts.wake,
            log=log,
        )
        pauses = BrokerPauses(rate_limiter)
        lister = AccountLister(
            lease=self._lease,
            shared_state=shared_state,
            rate_limiter=rate_limiter,
            pauses=pauses,
            reconcile=AccountReconciler(
                self._tracker,
                worker_id=config.worker_id,
                shared_state=shared_state,
                add_event=send_buffer.add_event,
                log=log,
            ).reconcile,
            log=log,
        )
        self.broker_sessions = BrokerSessions(
            attempts,
            lease=self._lease,
            shared_state=shared_state,
            health=self.health,
            rate_limiter=rate_limiter,
            pauses=pauses,
            lister=lister,
            login_pause=config.login_pause,
            log=log,
        )
        self._postponed = PostponedOrder(self._queue_reader, self.broker_sessions, log)
        self._recovery = SessionRecovery(
            self.broker_sessions,
            shared_state=shared_state,
            add_event=send_buffer.add_worker_event,
            log=log,
        )
        broker_calls = BrokerCalls(
            self.broker_sessions,
            rate_limiter,
            lease=self._lease,
            shared_state=shared_state,
            broker_timeout=config.broker_timeout,
            log=log,
        )
        self._instruments = InstrumentReader(broker_calls, log)
        self._request_handler = _build_request_handler(
            parts,
            broker_calls,
            self.broker_sessions,
            self._tracker,
            self._unknown_outcomes,
            self._instruments,
        )
        self._control = ControlHandler(
            parts, self.broker_sessions, self._recovery, self.load_open_orders
        )
        self._retry = Backoff(0.05, 2.0)
        self._may_have_work = True
        #: Paces the checks of whether the switch was written to this server of Valkey.
        self._switch_check = Backoff(0.05, 1.0)
        self._switch_is_current = True
        self._leftovers_due = True
        self._closed_for_lease = False

    def load_open_orders(self, open_orders: Sequence[PlaceOrder]) -> None:
        """Loads the user's orders that are not final, before the broker's list is read."""
        self._tracker.load_open_orders(open_orders)
        self._unknown_outcomes.load_open_orders(open_orders)

    def connect(self, accounts: list[OpenedAccount], timeout: float) -> None:
        """Logs in to every account, within `timeout` seconds; raises an error if all fail."""
        if not self.broker_sessions.loaded:
            self.broker_sessions.load(accounts)
        self.broker_sessions.connect_all(timeout)

    def queue_changed(self) -> None:
        """Notes that the queue may have an item."""
        self._may_have_work = True

    def step(self) -> None:
        """Does all that is due. Raises `WorkerExit` when this worker must end."""
        self._check_lease()  # before anything that may wait for Valkey
        self._apply_order_changes()
        if self.broker_sessions.collect_logins() and not self._closed_for_lease:
            self.health.update(self.broker_sessions.account_sessions())
            self._shared_state.state = self.broker_sessions.state()
        self._send_buffer.flush_if_due()
        if not self._check_lease():
            return
        if self._closed_for_lease:
            self._closed_for_lease = False
            self._log.info("lease_back")
            self._shared_state.state = self.broker_sessions.state()
            self._may_have_work = True
        if self._postponed.take_expiry() or (
            not self._switch_is_current and self._switch_check.due()
        ):
            self._may_have_work = True
        if self._may_have_work and self._retry.due():
            self._serve_queue()
        self.broker_sessions.renew_leases()
        self._instruments.forget_if_idle()
        if not self._may_have_work and not self._stopping():
            self._recovery.run_due(self._config.health_period)

    def seconds_until_due(self) -> float:
        """Returns the seconds until `step` is due again, at most one."""
        if self._changes:
            return 0.0
        waits: list[float | None] = (
            [0.2] if self._closed_for_lease else [1.0, max(0.0, self._lease.usable())]
        )
        if self._may_have_work and not self._closed_for_lease:
            waits.append(self._retry.seconds_until_due())
        if not self._may_have_work and not self._closed_for_lease:
            waits.append(self._recovery.seconds_until_due(self._config.health_period))
            if self._postponed.is_waiting:
                waits.append(self._postponed.remaining_s())
            if not self._switch_is_current:
                waits.append(self._switch_check.seconds_until_due())
        waits.append(self._send_buffer.seconds_until_due())
        return min(wait for wait in waits if wait is not None)

    def close(self) -> None:
        """Closes the broker sessions and applies their last reports."""
        self._postponed.close()
        self.broker_sessions.close_all()
        self._apply_order_changes()

    def _serve_queue(self) -> None:
        try:
            while not self._stopping() and self._lease.usable() > 0:
                if self._leftovers_due:
                    self._answer_leftovers()
                returned = self._postponed.put_back()
                if returned is not None:
                    self._request_handler.answer_leftover(returned)
                self._check_switch_server()
                control_only = (
                    self._postponed.is_waiting
                    or not self.broker_sessions.loaded
                    or not self._switch_is_current
                )
                item = self._queue_reader.pop(control_only=control_only)
                self._retry.reset()
                if not self._handle(item):
                    return
        except ValkeyFailed as error:
            self._log.warning("pop_failed", code=error.code, reason=error.detail)
            self._retry.failed()

    def _check_switch_server(self) -> None:
        current = self._queue_reader.is_switch_current()
        if current:
            self._switch_check.reset()
        else:
            self._switch_check.failed()
        if current != self._switch_is_current:
            self._log.warning("switch_is_back" if current else "switch_of_another_server")
        self._switch_is_current = current

    def _handle(self, item: QueueItem) -> bool:
        """Handles one item; returns whether to pop again."""
        if item.kind == "control":
            had_credentials = self.broker_sessions.loaded
            self._control.handle(item.raw)
            # Again before the first request: a late pop of the predecessor may have arrived since.
            self._leftovers_due = not had_credentials and self.broker_sessions.loaded
        elif item.kind == "request":
            self._shared_state.last_activity_ms = wall_ms()
            try:
                self._request_handler.handle(item)
            except OrderPostponed as postponed:
                self._postponed.hold(postponed.order, item)
            self._send_buffer.flush()
            self._request_handler.log_answer()
            self._apply_order_changes()
            if not self._postponed.is_waiting and not self._send_buffer.more_to_pop:
                self._may_have_work = False
                return False
        elif item.kind == "fenced":
            self._shared_state.fenced = 1
            self._send_buffer.add_worker_event(WorkerEventKind.FENCED, "at pop")
            raise WorkerExit(ExitCode.FENCED, "another epoch owns the user")
        elif item.kind == "no_owner":
            # The orchestrator restores it; the supervisor has sent an event.
            self._retry.failed()
            return False
        elif item.kind == "stale":  # should not happen to the newest pop; the next number is newer
            self._log.warning("stale_pop")
        else:
            self._may_have_work = False
            return False
        return True

    def _answer_leftovers(self) -> None:
        """Answers what a former worker or session left in processing; executes nothing again."""
        items, generation, now_ms = self._queue_reader.read_leftovers()
        for item in items:
            self._request_handler.answer_leftover(item, generation, now_ms)
        self._send_buffer.flush()
        self._leftovers_due = False

    def _check_lease(self) -> bool:
        """Returns True if the lease lets this session act; closes its broker sessions if not."""
        if self._shared_state.fenced:
            raise WorkerExit(ExitCode.FENCED, "another epoch owns the user")
        if self._lease.usable() > 0:
            return True
        self._close_for_lease()
        return False

    def _close_for_lease(self) -> None:
        if self._closed_for_lease:
            return
        self._closed_for_lease = True
        self._log.warning("lease_ending", left=round(self._lease.remaining_s(), 3))
        self._shared_state.state = WorkerActivity.Parked
        self.broker_sessions.close_all()
        self.health.report_lease_ending()

    def _on_order_changed(self, key: ConnectionKey, change: OrderChanged) -> None:
        """Receives a change from a broker's adapter, in any thread."""
        self._changes.append((key, change))
        if get_ident() != self._thread:  # which applies them anyway before it waits
            self._wake()

    def _apply_order_changes(self) -> None:
        if not self._changes:
            return
        while self._changes:
            key, change = self._changes.popleft()
            try:
                self._tracker.apply_change(key, change)
            except Exception as error:  # one odd report must not end the session
                self._log.crash("order_change_crashed", error)
        self._send_buffer.flush_if_due()
