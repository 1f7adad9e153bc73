"""The states of a user's worker as a picture and a table, made from the code.

`python -m tests.unit.workflows.lifecycle_diagram docs/how-it-works/lifecycle.md` puts both between the
markers of that page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workflows.user_worker.messages import CRASH_WINDOW, UserWorkerSettings, WorkerState
from workflows.user_worker.state import ALLOWED, CRASH_LIMIT, NEXT_STEP, UserWorkerState

BEGIN = "<!-- states: made by python -m tests.unit.workflows.lifecycle_diagram; do not edit -->"
END = "<!-- end of states -->"

S = WorkerState

#: Why a state follows another, for every pair of `ALLOWED`.
WHY: dict[tuple[WorkerState, WorkerState], str] = {
    (S.POOL_IDLE, S.CLAIMED): "someone needs a worker",
    (S.POOL_IDLE, S.DRAINING): "shutdown, or nobody came",
    (S.CLAIMED, S.CONNECTING): "a worker was found",
    (S.CLAIMED, S.FAILED): "nothing to claim, or crashes of late",
    (S.CLAIMED, S.DRAINING): "shutdown",
    (S.CONNECTING, S.ACTIVE): "logged in",
    (S.CONNECTING, S.FAILED): "login failed, or the worker ended",
    (S.CONNECTING, S.DRAINING): "shutdown",
    (S.FAILED, S.FAILED): "failed again",
    (S.FAILED, S.CLAIMED): "next worker",
    (S.FAILED, S.CONNECTING): "next login",
    (S.FAILED, S.PARKED): f"{CRASH_LIMIT} crashes in {CRASH_WINDOW / 60:g} min",
    (S.FAILED, S.DRAINING): "gave up, or shutdown",
    (S.ACTIVE, S.RECONNECTING): "broker or session lost",
    (S.ACTIVE, S.FAILED): "the worker died",
    (S.ACTIVE, S.IDLE_TIMEOUT): "not used",
    (S.ACTIVE, S.DRAINING): "shutdown, or the broker is lost for good",
    (S.RECONNECTING, S.ACTIVE): "connected again",
    (S.RECONNECTING, S.FAILED): "the worker died",
    (S.RECONNECTING, S.IDLE_TIMEOUT): "not used",
    (S.RECONNECTING, S.DRAINING): "shutdown, or the broker is lost for good",
    (S.IDLE_TIMEOUT, S.DRAINING): "at once",
    (S.DRAINING, S.DRAINING): "asked again",
    (S.DRAINING, S.TERMINATED): "the end is confirmed",
    (S.DRAINING, S.POOL_IDLE): "orders were left",
    (S.PARKED, S.POOL_IDLE): "signal resume",
    (S.PARKED, S.DRAINING): "shutdown, or nobody came",
}

#: What happens at a state's deadline.
AT_DEADLINE: dict[WorkerState, str] = {
    S.POOL_IDLE: "the run ends",
    S.CLAIMED: "counts as failed",
    S.CONNECTING: "counts as failed; three logins at most",
    S.FAILED: "the launcher is asked again, until it confirms the old worker's end",
    S.ACTIVE: "checks the worker: IdleTimeout if not used since; else it may stay that much longer",
    S.RECONNECTING: "checks the worker, then every 20 min: IdleTimeout if it was idle for that timeout",
    S.IDLE_TIMEOUT: "Draining",
    S.DRAINING: "the launcher is asked again, until it confirms the end",
    S.PARKED: "the run ends; the next order starts anew",
    S.TERMINATED: "-",
}


def duration(seconds: float | None) -> str:
    """A duration for people."""
    if seconds is None:
        return "-"
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def diagram() -> str:
    """Mermaid's `stateDiagram-v2` of the table `ALLOWED`."""
    edges = [
        f"    {before} --> {after}: {WHY[before, after]}"
        for before, follow in ALLOWED.items()
        for after in S
        if after in follow
    ]
    ends = [f"    [*] --> {S.POOL_IDLE}", *edges, f"    {S.TERMINATED} --> [*]"]
    return "\n".join(["```mermaid", "stateDiagram-v2", *ends, "```"])


def table() -> str:
    """Markdown: every state, what it does, how long at most with the default settings, and what then."""
    plain = UserWorkerState(user_id="", pool="", settings=UserWorkerSettings())
    rows = [
        f"| {state} | {NEXT_STEP[state]} | {duration(plain.deadline_of(state, 0.0))} | {AT_DEADLINE[state]} |"
        for state in ALLOWED
    ]
    return "\n".join(["| state | what happens | at most | and then |", "|---|---|---|---|", *rows])


def render_page(page: str) -> str:
    """`page` with the present picture and table between its markers; raises `ValueError` without them."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{diagram()}\n\n{table()}\n{END}{tail}"


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(render_page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
