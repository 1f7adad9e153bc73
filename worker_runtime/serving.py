"""A user's worker at work: control messages first, then requests in order, broker health in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident

from worker_runtime.backoff import Backoff
from worker_runtime.board import Board, State
from worker_runtime.boottime import wall_ms
from worker_runtime.brokers.port import BrokerFactory, ConnectionKey
from worker_runtime.calls import Calls
from worker_runtime.changes import Changing
from worker_runtime.connection import Account
from worker_runtime.connections import Connections
from worker_runtime.control import Control
from worker_runtime.credentials import Opener
from worker_runtime.desk import Desk
from worker_runtime.exits import WorkerEnds
from worker_runtime.fills import Ledger
from worker_runtime.health import Health
from worker_runtime.inlet import Inlet, Piece
from worker_runtime.lease import Lease
from worker_runtime.log import Log
from worker_runtime.orders import Placing
from worker_runtime.outbox import Outbox
from worker_runtime.protocol.exchange import OrderChanged
from worker_runtime.protocol.exit_codes import ExitCode
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import PlaceOrder, WorkerEventKind
from worker_runtime.queries import Querying
from worker_runtime.reconciling import Reconciling
from worker_runtime.recovery import Recovery
from worker_runtime.shared_budget import SharedBudget
from worker_runtime.unsettled import Unsettled
from worker_runtime.valkey import Valkey, ValkeyFailed
from worker_runtime.waiting import Waiting


class Serving:
    """Serves one user from the claim on. Driven by the session's loop: `step` when anything happened."""

    def __init__(
        self,
        config: WorkerConfig,
        board: Board,
        *,
        client: Valkey,
        outbox: Outbox,
        opener: Opener,
        load_factory: Callable[[], BrokerFactory],
        stopping: Callable[[], bool],
        wake: Callable[[], None],
        log: Log,
    ) -> None:
        self._config = config
        self._board = board
        self._outbox = outbox
        self._stopping = stopping
        self._wake = wake
        self._log = log
        self._lease = Lease(board)
        #: Of this object: the one that takes the changes.
        self._thread = get_ident()
        self._changes: deque[tuple[ConnectionKey, OrderChanged]] = deque()
        self._inlet = Inlet(client, board, config.worker_id)
        self._ledger = Ledger(board.epoch, outbox.event, log)
        self._unsettled = Unsettled(self._ledger)
        self.health = Health(board, outbox.tell)
        self._budget = budget = SharedBudget(client, config, board, log)
        self.connections = Connections(
            load_factory,
            client=f"{config.worker_id}/{board.epoch}",
            lease=self._lease,
            board=board,
            health=self.health,
            budget=budget,
            on_order=self._noticed,
            reconcile=Reconciling(
                self._ledger, worker_id=config.worker_id, board=board, tell=outbox.event, log=log
            ).look,
            log=log,
        )
        self._waiting = Waiting(self._inlet, self.connections, log)
        self._recovery = Recovery(self.connections, board=board, tell=outbox.tell, log=log)
        calls = Calls(
            self.connections,
            budget,
            lease=self._lease,
            board=board,
            broker_timeout=config.broker_timeout,
            log=log,
        )
        self._desk = Desk(
            Placing(calls, self._ledger, self._unsettled, outbox=outbox, board=board, log=log),
            Changing(calls, self._ledger),
            Querying(calls, self._ledger),
            connections=self.connections,
            outbox=outbox,
            board=board,
            log=log,
        )
        self._control = Control(
            self.connections,
            self._recovery,
            self.prime,
            orchestrator_key=config.orchestrator_key,
            opener=opener,
            outbox=outbox,
            board=board,
            worker_id=config.worker_id,
            log=log,
        )
        self._retry = Backoff(0.05, 2.0)
        self._hungry = True
        #: The doorbell rang, and nothing has been popped since: an order is likely.
        self._rung = False
        #: Until the next look whether Valkey's switch is its own; due at once while it is.
        self._unbound = Backoff(0.05, 1.0)
        self._bound = True
        self._clear_due = True
        self._parked = False

    def prime(self, open_orders: Sequence[PlaceOrder]) -> None:
        """Takes note of the user's orders that are not final, before the broker is asked for them."""
        self._ledger.prime(open_orders)
        self._unsettled.prime(open_orders)

    def connect(self, accounts: list[Account], timeout: float) -> None:
        """Logs in to every account, within `timeout` seconds; raises the first login's error."""
        if accounts:
            self.connections.load(accounts)
        self.connections.connect_all(timeout)

    def rung(self) -> None:
        """There is something to pop, as far as anybody knows."""
        self._hungry = True
        self._rung = True

    def look(self) -> None:
        """There may be something to pop."""
        self._hungry = True

    def step(self) -> None:
        """Does all that is due. Raises `WorkerEnds` when this worker has to go."""
        self._heed_lease()  # before anything that may wait for Valkey
        self._take_changes()
        self._outbox.flush_if_due()
        if not self._heed_lease():
            return
        if self._parked:
            self._parked = False
            self._log.info("lease_back")
            self._board.state = self.connections.state()
            self._hungry = True
        if self._waiting.ended() or (not self._bound and self._unbound.due()):
            self._hungry = True
        if self._hungry and self._retry.due():
            self._work()
        self.connections.keep()
        if not self._hungry and not self._stopping():
            self._recovery.tend(self._config.health_period)

    def left(self) -> float:
        """Seconds until `step` is due again, at most one."""
        if self._changes:
            return 0.0
        waits: list[float | None] = [0.2] if self._parked else [1.0, max(0.0, self._lease.usable())]
        if self._hungry and not self._parked:
            waits.append(self._retry.left())
        if not self._hungry and not self._parked:
            waits.append(self._recovery.left(self._config.health_period))
            if self._waiting.on:
                waits.append(self._waiting.left())
            if not self._bound:
                waits.append(self._unbound.left())
        waits.append(self._outbox.left())
        return min(wait for wait in waits if wait is not None)

    def close(self) -> None:
        """Closes the broker sessions and notes what they told last."""
        self._waiting.close()
        self.connections.close_all()
        self._take_changes()

    def _work(self) -> None:
        try:
            while not self._stopping() and self._lease.usable() > 0:
                if self._clear_due:
                    self._clear()
                left = self._waiting.put_back()
                if left is not None:
                    self._desk.give_up(left)
                self._look_whether_bound()
                held = self._waiting.on or not self.connections.loaded or not self._bound
                likely = self._rung and not held
                piece = self._inlet.pop(
                    control_only=held,
                    ahead=self._budget if likely else None,
                    accounts=self.connections.trading() if likely else (),
                )
                self._rung = False
                self._retry.reset()
                if not self._handle(piece):
                    return
        except ValkeyFailed as error:
            self._log.warning("pop_failed", code=error.code, reason=error.detail)
            self._retry.failed()

    def _look_whether_bound(self) -> None:
        bound = self._inlet.bound()
        if bound:
            self._unbound.reset()
        else:
            self._unbound.failed()
        if bound != self._bound:
            self._log.warning("switch_is_back" if bound else "switch_of_another_server")
        self._bound = bound

    def _handle(self, piece: Piece) -> bool:
        """Deals with one piece; false if there is nothing more for now."""
        if piece.kind == "control":
            waiting = not self.connections.loaded
            self._control.handle(piece.item)
            # Once more before the first request: a late pop of our predecessor may have come through since.
            self._clear_due = waiting and self.connections.loaded
        elif piece.kind == "request":
            self._board.last_activity_ms = wall_ms()
            postponed = self._desk.handle(piece)
            if postponed is not None:
                self._waiting.hold(postponed, piece)
            self._outbox.flush()
            self._desk.note()
            self._take_changes()
            if postponed is None and not self._outbox.more:
                self._hungry = False
                return False
        elif piece.kind == "fenced":
            self._board.fenced = 1
            self._outbox.tell(WorkerEventKind.FENCED, "at pop")
            raise WorkerEnds(ExitCode.FENCED, "another epoch owns the user")
        elif piece.kind == "no_owner":  # the orchestrator restores it; the supervisor has told
            self._retry.failed()
            return False
        elif piece.kind == "stale":  # not to be expected of the newest pop; the next number is newer
            self._log.warning("stale_pop")
        else:
            self._hungry = False
            return False
        return True

    def _clear(self) -> None:
        """Answers what a former worker, or the session before this one, left in the processing list: it is
        never executed again."""
        for item in self._inlet.left_behind():
            self._desk.give_up(item)
        self._outbox.flush()
        self._clear_due = False

    def _heed_lease(self) -> bool:
        """Whether the lease lets this session act; if not, its broker sessions are closed."""
        if self._board.fenced:
            raise WorkerEnds(ExitCode.FENCED, "another epoch owns the user")
        if self._lease.usable() > 0:
            return True
        self._park()
        return False

    def _park(self) -> None:
        if self._parked:
            return
        self._parked = True
        self._log.warning("lease_ending", left=round(self._lease.left(), 3))
        self._board.state = State.Parked
        self.connections.close_all()
        self.health.parked()

    def _noticed(self, key: ConnectionKey, change: OrderChanged) -> None:
        """Called by the broker's adapter, from any thread."""
        self._changes.append((key, change))
        if get_ident() != self._thread:  # this one comes to them by itself, before it waits
            self._wake()

    def _take_changes(self) -> None:
        if not self._changes:
            return
        while self._changes:
            key, change = self._changes.popleft()
            try:
                self._ledger.changed(key, change)
            except Exception as error:  # one odd report must not end the session
                self._log.crash("order_change_crashed", error)
        self._outbox.flush_if_due()
