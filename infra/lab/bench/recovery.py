"""`berth bench recovery`: from kill -9 of a worker to Active again,
on a new worker with a higher epoch.

Each round has a user of its own, so that no crash backoff applies, and a full pool; refill and
clean-up happen between the rounds. The clock starts right after the kill. It stops when the
mark carries a higher epoch, the worker says that it is Active, and the API's view of the
workflow says the same. An order is sent right after the kill, too: its answer shows when the
user is really served again.

Apart from these, some rounds harm the session process only: killed, or stopped until the supervisor
misses its pulse (`pulse_timeout`). The worker then replaces it in place, so the epoch stays and the
clock stops when a later session of the same worker is Active.

At last their host stands still: all processes of all workers of users stop for some seconds. Nobody
may be replaced for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from infra.lab import figures
from infra.lab.bench import order
from infra.lab.figures import Say, silent
from infra.lab.marks import MarkPoller, PolledMark
from infra.lab.processes import WorkerKill, kill_worker, processes_of, send_signal
from infra.lab.rest import RequestFailed, RestConnection
from infra.lab.target import BenchUser, Target, running
from infra.local.process import ServerFailed

#: Warm workers: the figure is for a pool that is not empty.
_POOL_SIZE = 3
#: In one round of this many, only the worker's first process is killed.
_ROUNDS_PER_ZYGOTE_KILL = 4
#: Seconds; a round that takes longer has failed: by then the mark has expired, too.
_ROUND_TIMEOUT_S = 60.0
#: Seconds for which a host stands still: twice the time after which a session counts as frozen.
_STALL_TIME_S = 6.0


@dataclass(frozen=True, kw_only=True)
class RecoveryRound:
    """Describes a kill and what followed. Seconds from the kill."""

    killed: WorkerKill
    active: float
    #: When the order that was sent right after the kill was answered.
    answered: float
    #: The answer to it: a state such as `filled`, or `refused`.
    outcome: str


class RecoveryRounds:
    """Kills workers of one stack, one after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._marks = MarkPoller(target.settings.valkey_url)

    def close(self) -> None:
        self._marks.close()

    def one(self, user: BenchUser, kill: WorkerKill) -> RecoveryRound:
        """Makes the user Active with one filled order,
        kills the worker and measures; then stops the user."""
        target = self._target
        workers = len(target.workers())
        target.wait_ready(_POOL_SIZE)
        connection = RestConnection(target.api_url, user.api_key)
        try:
            worker = connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
            order.send_order(connection, user)
            target.wait_ready(_POOL_SIZE)  # the refill is not part of the measurement
            pid = target.worker_pids()[worker["worker_id"]]
            result = self._measure(user, connection, pid, kill)
            connection.call("POST", f"/v1/users/{user.user_id}/worker/stop", {})
        finally:
            connection.close()
        target.wait_workers(max(workers, _POOL_SIZE))
        return result

    def _measure(
        self, user: BenchUser, connection: RestConnection, pid: int, kill: WorkerKill
    ) -> RecoveryRound:
        killed = threading.Event()
        before = self._marks.read_mark(user.user_id)
        with ThreadPoolExecutor(max_workers=1) as thread:
            placing = thread.submit(self._send_order, user, killed)
            began = time.monotonic()
            try:
                kill_worker(pid, int(before.metadata["pid"]), kill)
                began = time.monotonic()
            finally:
                killed.set()
            self._await_active(user, connection, before, kill, began + _ROUND_TIMEOUT_S)
            active = time.monotonic() - began
            answered_at, outcome = placing.result()
        return RecoveryRound(
            killed=kill, active=active, answered=answered_at - began, outcome=outcome
        )

    def _await_active(
        self,
        user: BenchUser,
        connection: RestConnection,
        before: PolledMark,
        kill: WorkerKill,
        until: float,
    ) -> None:
        """Waits until mark, metadata and workflow agree on who serves now. Raises
        `ServerFailed`."""

        def again(seen: PolledMark) -> bool:
            if kill.in_place:
                later = seen.worker_id == before.worker_id and seen.session > before.session
            else:
                later = seen.epoch > before.epoch
            return later and seen.state == "Active"

        epoch = self._marks.wait(user.user_id, again, until).epoch
        while True:
            view = connection.call("GET", f"/v1/users/{user.user_id}/worker")
            lifecycle, mark = view["lifecycle"], view["mark"]
            agreed = view["live"] and view["state"] == lifecycle["state"] == "Active"
            if agreed and mark["epoch"] == lifecycle["epoch"] == epoch:
                return
            if time.monotonic() > until:
                raise ServerFailed(
                    f"not Active again {_ROUND_TIMEOUT_S:.0f} s after the kill: {view}"
                )

    def _send_order(self, user: BenchUser, killed: threading.Event) -> tuple[float, str]:
        """Places an order as soon as `killed` is set; when it was answered, and how."""
        connection = RestConnection(self._target.api_url, user.api_key)
        # Connected, and the key is known.
        connection.call("GET", f"/v1/users/{user.user_id}/worker")
        killed.wait()
        try:
            path = f"/v1/users/{user.user_id}/orders?wait=30"
            outcome = str(connection.call("POST", path, order.order_body(user))["state"])
        except RequestFailed:
            outcome = "refused"
        connection.close()
        return time.monotonic(), outcome

    def stand_still(self, users: Sequence[BenchUser]) -> int:
        """Counts the users that have another worker or session after their host has stood still."""
        for user in users:
            connection = RestConnection(self._target.api_url, user.api_key)
            connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
            order.send_order(connection, user)
            connection.close()
        before = {user.user_id: self._marks.read_mark(user.user_id) for user in users}
        stopped = [pid for mark in before.values() for pid in processes_of(mark.worker_id).all]
        send_signal(signal.SIGSTOP, *stopped)
        time.sleep(_STALL_TIME_S)
        send_signal(signal.SIGCONT, *stopped)
        # A replacement would begin within this.
        time.sleep(self._target.settings.pulse_timeout + 2.0)
        after = {name: self._marks.read_mark(name) for name in before}
        return sum(
            (mark.epoch, mark.session) != (after[name].epoch, after[name].session)
            for name, mark in before.items()
        )


def run(
    n: int = 40, replaced: int = 8, frozen: int = 3, stalled: int = 10, say: Say = silent
) -> dict[str, Any]:
    """Makes `n` kills: every fourth of the first process only, the others of all processes at once.

    Then `replaced` kills of the session process alone, and `frozen` stops of it; at last the host
    of `stalled` users stands still.
    """
    with running(pool_target=_POOL_SIZE) as target:
        return measure(target, n, replaced, frozen, stalled, say)


def measure(
    target: Target, n: int, replaced: int, frozen: int, stalled: int = 0, say: Say = silent
) -> dict[str, Any]:
    """Measures on a stack that runs: one round, and one new user, for each kill."""
    plan = [
        WorkerKill.TREE if number % _ROUNDS_PER_ZYGOTE_KILL else WorkerKill.ZYGOTE
        for number in range(1, n + 1)
    ]
    plan += [WorkerKill.SESSION] * replaced + [WorkerKill.FROZEN] * frozen
    done: list[RecoveryRound] = []
    target.fill_pool(_POOL_SIZE)
    users = target.make_users("phoenix", len(plan))
    rounds = RecoveryRounds(target)
    try:
        for user, kill in zip(users, plan, strict=True):
            done.append(rounds.one(user, kill))
            say(
                f"recovery: {len(done)} of {len(plan)} rounds, the last one took "
                f"{done[-1].active:.2f} s"
            )
        harmed = rounds.stand_still(target.make_users("sleeper", stalled)) if stalled else 0
    finally:
        rounds.close()
    pulse_timeout = target.settings.pulse_timeout
    parts = {
        kill: [done_round for done_round in done if done_round.killed is kill]
        for kill in WorkerKill
    }
    workers = [kill for kill in WorkerKill if not kill.in_place]
    return {
        **_figures([done_round for done_round in done if not done_round.killed.in_place]),
        "by_kill": {kill.value: _figures(parts[kill]) for kill in workers if parts[kill]},
        "in_place": {
            kill.value: _figures(parts[kill])
            for kill in WorkerKill
            if kill.in_place and parts[kill]
        },
        "pulse_timeout_s": pulse_timeout,
        **(
            {"stall": {"s": _STALL_TIME_S, "users": stalled, "replaced": harmed}} if stalled else {}
        ),
    }


def _figures(rounds: Sequence[RecoveryRound]) -> dict[str, Any]:
    active = [done_round.active for done_round in rounds]
    answered = [done_round.answered for done_round in rounds]
    return {
        "n": len(rounds),
        **figures.seconds(active, 50, 90, 99),
        "max_s": round(max(active), 3),
        "order_p50_s": figures.seconds(answered, 50)["p50_s"],
        "order_p99_s": figures.seconds(answered, 99)["p99_s"],
        "orders_filled": sum(done_round.outcome == "filled" for done_round in rounds),
        "orders_unknown": sum(done_round.outcome == "unknown" for done_round in rounds),
        "orders_refused": sum(done_round.outcome == "refused" for done_round in rounds),
    }


_NAMES = {
    WorkerKill.TREE: "all its processes killed",
    WorkerKill.ZYGOTE: "its first process killed",
    WorkerKill.SESSION: "in place: its session process killed",
    WorkerKill.FROZEN: "in place: its session process stopped",
}


def table(result: dict[str, Any]) -> None:
    rows = [(f"kill -9 to Active again, n={result['n']}", _row(result))]
    for kill, part in (result["by_kill"] | result["in_place"]).items():
        rows.append((f"… {_NAMES[WorkerKill(kill)]}, n={part['n']}", _row(part)))
    rows.append(
        (
            "an order sent right after the kill",
            f"answered p50 {result['order_p50_s']}   p99 {result['order_p99_s']}   "
            f"filled {result['orders_filled']} of {result['n']}",
        )
    )
    if stall := result.get("stall"):
        harmed = f"{stall['replaced']} of {stall['users']} users' sessions replaced"
        rows.append((f"the host stands still for {stall['s']:g} s", harmed))
    figures.print_table("recovery: kill -9 to Active again, a pool that is not empty (s)", rows)


def _row(part: dict[str, Any]) -> str:
    return f"p50 {part['p50_s']}   p90 {part['p90_s']}   p99 {part['p99_s']}   max {part['max_s']}"
