"""Makes a picture and a table of a user worker's states from the code.

`python -m tests.unit.workflows.lifecycle_diagram docs/how-it-works/lifecycle.md` puts both between
the markers of that page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workflows.user_worker.messages import CRASH_WINDOW_S, UserWorkerSettings, WorkerState
from workflows.user_worker.state import ALLOWED, MAX_CRASHES, NEXT_STEP, UserWorkerState

BEGIN = "<!-- states: made by python -m tests.unit.workflows.lifecycle_diagram; do not edit -->"
END = "<!-- end of states -->"


#: Why a state follows another, for every pair of `ALLOWED`.
WHY: dict[tuple[WorkerState, WorkerState], str] = {
    (WorkerState.POOL_IDLE, WorkerState.CLAIMED): "someone needs a worker",
    (WorkerState.POOL_IDLE, WorkerState.DRAINING): "shutdown, or nobody came",
    (WorkerState.CLAIMED, WorkerState.CONNECTING): "a worker was found",
    (WorkerState.CLAIMED, WorkerState.FAILED): "nothing to claim, or crashes of late",
    (WorkerState.CLAIMED, WorkerState.DRAINING): "shutdown",
    (WorkerState.CONNECTING, WorkerState.ACTIVE): "logged in",
    (WorkerState.CONNECTING, WorkerState.FAILED): "login failed, or the worker ended",
    (WorkerState.CONNECTING, WorkerState.DRAINING): "shutdown",
    (WorkerState.FAILED, WorkerState.FAILED): "failed again",
    (WorkerState.FAILED, WorkerState.CLAIMED): "next worker",
    (WorkerState.FAILED, WorkerState.CONNECTING): "next login",
    (WorkerState.FAILED, WorkerState.PARKED): (
        f"{MAX_CRASHES} crashes in {CRASH_WINDOW_S / 60:g} min"
    ),
    (WorkerState.FAILED, WorkerState.DRAINING): "gave up, or shutdown",
    (WorkerState.ACTIVE, WorkerState.RECONNECTING): "broker or session lost",
    (WorkerState.ACTIVE, WorkerState.FAILED): "the worker died",
    (WorkerState.ACTIVE, WorkerState.IDLE_TIMEOUT): "not used",
    (WorkerState.ACTIVE, WorkerState.DRAINING): "shutdown, or the broker is lost for good",
    (WorkerState.RECONNECTING, WorkerState.ACTIVE): "connected again",
    (WorkerState.RECONNECTING, WorkerState.FAILED): "the worker died",
    (WorkerState.RECONNECTING, WorkerState.IDLE_TIMEOUT): "not used",
    (WorkerState.RECONNECTING, WorkerState.DRAINING): "shutdown, or the broker is lost for good",
    (WorkerState.IDLE_TIMEOUT, WorkerState.DRAINING): "at once",
    (WorkerState.DRAINING, WorkerState.DRAINING): "asked again",
    (WorkerState.DRAINING, WorkerState.TERMINATED): "the end is confirmed",
    (WorkerState.DRAINING, WorkerState.POOL_IDLE): "orders were left",
    (WorkerState.PARKED, WorkerState.POOL_IDLE): "signal resume",
    (WorkerState.PARKED, WorkerState.DRAINING): "shutdown, or nobody came",
}

#: What happens at a state's deadline.
AT_DEADLINE: dict[WorkerState, str] = {
    WorkerState.POOL_IDLE: "the run ends",
    WorkerState.CLAIMED: "counts as failed",
    WorkerState.CONNECTING: "counts as failed; three logins at most",
    WorkerState.FAILED: "Berth asks again until the old worker's end is certain",
    WorkerState.ACTIVE: "checks the worker: IdleTimeout if not used since; else it may stay "
    "that much longer",
    WorkerState.RECONNECTING: "checks the worker, then every 20 min: IdleTimeout if it was "
    "idle that long",
    WorkerState.IDLE_TIMEOUT: "Draining",
    WorkerState.DRAINING: "Berth asks again until the end is certain",
    WorkerState.PARKED: "the run ends; the next order starts anew",
    WorkerState.TERMINATED: "-",
}


def duration(seconds: float | None) -> str:
    """Returns a duration as people write it."""
    if seconds is None:
        return "-"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def diagram() -> str:
    """Returns Mermaid's `stateDiagram-v2` of the table `ALLOWED`."""
    edges = [
        f"    {before} --> {after}: {WHY[before, after]}"
        for before, follow in ALLOWED.items()
        for after in WorkerState
        if after in follow
    ]
    ends = [f"    [*] --> {WorkerState.POOL_IDLE}", *edges, f"    {WorkerState.TERMINATED} --> [*]"]
    return "\n".join(["```mermaid", "stateDiagram-v2", *ends, "```"])


def table() -> str:
    """Returns every state in Markdown: what it does, how long at most with the default settings,
    and what then."""
    plain = UserWorkerState(user_id="", pool="", settings=UserWorkerSettings())
    rows = [
        f"| {state} | {NEXT_STEP[state]} | {duration(plain.deadline_of(state, 0.0))} | "
        f"{AT_DEADLINE[state]} |"
        for state in ALLOWED
    ]
    return "\n".join(["| state | what happens | at most | and then |", "|---|---|---|---|", *rows])


def render_page(page: str) -> str:
    """Returns `page` with the present picture and table between its markers; raises `ValueError`
    without them."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{diagram()}\n\n{table()}\n{END}{tail}"


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(render_page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
