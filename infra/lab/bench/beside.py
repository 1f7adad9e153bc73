"""`berth bench beside CHECKOUT`: orders, or claims, of another checkout and of this one, by turns.

A shared machine changes its speed within a minute, by more than a change of ours is worth; so two
runs one after the other say nothing. Both systems run here at the same time, each from its own
code, and get small blocks of work by turns: while one works, the other rests. What counts is the
median of the blocks' ratios.

A system is served by this file itself, run with its checkout as the place of its imports. So what
it calls has to be in older checkouts, too. Both share this environment's packages. The processes of
a system inherit `PYTHONPATH` only because `BERTH_LOCAL_PASS_ENVIRONMENT` says so; without it they
would run the code that is installed, for both sides.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from infra.lab import figures
from infra.lab.bench import order
from infra.lab.cpu import CpuMeter, StolenTime
from infra.lab.rest import RestConnection
from infra.lab.target import Target, running
from infra.local.process import ServerFailed

#: Orders before the measurement of orders.
_WARM_UP_ORDERS = 200
#: Seconds before each claim: they come at a pace, at most two a second of each side.
_CLAIM_INTERVAL_S = 0.25
#: Seconds for a start with a full pool, or a block of work; then a side is killed.
_WORK_TIMEOUT_S = 300.0
#: Seconds for a stop; then a side is killed.
_STOP_TIMEOUT_S = 60.0
#: Blocks, and the size of one.
_BLOCKS_AND_BLOCK_SIZE = {"order": (80, 25), "claim": (60, 1)}


class MeasuredCheckout:
    """Runs one of the two systems, in a process of its own."""

    def __init__(
        self, checkout: Path, work: str, total: int, *, timeout_s: float = _WORK_TIMEOUT_S
    ) -> None:
        """Raises `ServerFailed` for a folder that is no checkout. It starts meanwhile; see
        `wait`."""
        if not (checkout / "infra" / "lab" / "target.py").is_file():
            raise ServerFailed(f"{checkout} is no checkout of Berth")
        self.name = str(checkout)
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, work, str(total)],
            cwd=checkout,
            env=environment_of(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours alone: the end of its standard input ends it
        )
        self._counts, self._replies = (
            cast(IO[str], stream) for stream in (self._process.stdin, self._process.stdout)
        )

    def wait(self) -> Any:
        """Waits for what the process says next. Raises `ServerFailed` if it has ended, or says
        nothing for too long."""
        killing = threading.Timer(self._timeout_s, self._process.kill)  # its servers end with it
        killing.start()
        try:
            line = self._replies.readline()
        finally:
            killing.cancel()
        if not line:
            raise ServerFailed(f"the system of {self.name} has ended; what it said stands above")
        return json.loads(line)

    def run(self, count: int) -> Any:
        """Does so much work: seconds each took; of none, CPU milliseconds of one by part of the
        system."""
        with suppress(BrokenPipeError):  # `wait` says that it has ended
            self._counts.write(f"{count}\n")
            self._counts.flush()
        return self.wait()

    def close(self) -> None:
        try:
            # `communicate` closes its standard input, which ends it.
            self._process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def environment_of(checkout: Path) -> dict[str, str]:
    """Returns our environment, changed so that all processes of a local system run the code of this
    checkout."""
    from infra.settings import LocalSettings, read_settings  # older checkouts may lack them

    passed_on = {*read_settings(LocalSettings).pass_environment, "PYTHONPATH"}
    return {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "BERTH_LOCAL_PASS_ENVIRONMENT": json.dumps(sorted(passed_on)),
    }


def run(
    checkout: str,
    work: str = "order",
    blocks: int | None = None,
    say: figures.Say = figures.silent,
    *,
    timeout_s: float = _WORK_TIMEOUT_S,
) -> dict[str, Any]:
    """Measures `blocks` blocks of each side; `work` is order or claim.

    A side that starts or works for longer than `timeout_s` is ended. Raises `ServerFailed`.
    """
    usual, block = _BLOCKS_AND_BLOCK_SIZE[work]
    blocks = blocks or usual
    total = blocks * block
    taken: dict[str, list[list[float]]] = {"there": [], "here": []}
    with ExitStack() as stack:
        sides = {}
        for name, path in (("there", Path(checkout)), ("here", Path(__file__).parents[3])):
            sides[name] = MeasuredCheckout(path.resolve(), work, total, timeout_s=timeout_s)
            stack.callback(sides[name].close)
            # The other side starts after it: a busy machine may be too slow for two starts at once.
            sides[name].wait()
        stolen = StolenTime()
        for number in range(blocks):
            say(f"measuring: beside, block {number + 1} of {blocks}")
            for name in random.sample(list(sides), 2):
                taken[name].append(sides[name].run(block))
        stolen_percent = stolen.percent()
        cpu = {name: side.run(0) for name, side in sides.items()}
    medians = {
        name: [figures.percentile(times, 0.5) for times in times_of_blocks]
        for name, times_of_blocks in taken.items()
    }
    ratios = [here / there for here, there in zip(medians["here"], medians["there"], strict=True)]
    sides_figures = {
        name: {
            **figures.milliseconds(
                [duration for times in times_of_blocks for duration in times], 50, 99
            ),
            #: The CPU time of one piece of work, with what its system does while it rests.
            "cpu_ms": cpu[name],
        }
        for name, times_of_blocks in taken.items()
    }
    return {
        "checkout": checkout,
        "work": work,
        "blocks": blocks,
        "block": block,
        **sides_figures,
        "ratio": round(figures.percentile(ratios, 0.5), 3),
        "ratio_quartiles": [round(figures.percentile(ratios, share), 3) for share in (0.25, 0.75)],
        "stolen_percent": stolen_percent,
    }


def table(result: dict[str, Any]) -> None:
    low, high = result["ratio_quartiles"]
    rows = [
        (
            f"p50 here, times the p50 there, median of {result['blocks']} blocks",
            f"{result['ratio']}",
        ),
        ("a quarter of the blocks is below, and above", f"{low}, {high}"),
    ]
    for title, name in (("this checkout", "here"), (result["checkout"], "there")):
        of = result[name]
        rows.append((title, f"p50 {of['p50_ms']}   p99 {of['p99_ms']}"))
        rows.append(
            (
                "  CPU of one, ms",
                "   ".join(f"{part} {value}" for part, value in of["cpu_ms"].items()),
            )
        )
    rows.append(
        ("CPU time that the host gave to others meanwhile", f"{result['stolen_percent']} %")
    )
    title = f"beside: {result['work']}s by turns, {result['block']} a block (ms)"
    figures.print_table(title, rows)


# --- the process of one side: everything from here on also runs with older checkouts --------------

Work = Callable[[], float]


@contextmanager
def _orders(total: int) -> Iterator[tuple[Target, Work]]:
    """Lets a user with an active worker place order after order."""
    with running(pool_target=1, exchange_orders_per_10s=order.ORDERS_PER_10S) as target:
        target.fill_pool(1)
        target.pool_update("pause")
        [user] = target.make_users("trader", 1)
        connection = RestConnection(target.api_url, user.api_key)
        connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
        for _ in range(_WARM_UP_ORDERS):
            order.send_order(connection, user)
        yield target, lambda: order.send_order(connection, user)
        connection.close()


@contextmanager
def _claims(total: int) -> Iterator[tuple[Target, Work]]:
    """Lets user after user get a worker from a full pool, which is not filled again meanwhile."""
    with running(pool_target=total) as target:
        users = target.make_users("full", total)
        target.fill_pool(total)
        target.pool_update("pause")
        connections = [RestConnection(target.api_url, user.api_key) for user in users]
        for user, connection in zip(users, connections, strict=True):
            # Connected, and the key is known.
            connection.call("GET", f"/v1/users/{user.user_id}/worker")
        waiting = iter(zip(users, connections, strict=True))

        def claim() -> float:
            user, connection = next(waiting)
            time.sleep(_CLAIM_INTERVAL_S)
            began = time.perf_counter()
            connection.call("POST", f"/v1/users/{user.user_id}/worker/start")
            return time.perf_counter() - began

        yield target, claim
        for connection in connections:
            connection.close()


def _serve(work: str, total: int) -> None:
    """Says that it is ready; then does as much work as each line of standard input says."""
    with {"order": _orders, "claim": _claims}[work](total) as (target, act):
        print("true", flush=True)
        meter: CpuMeter | None = None
        for line in sys.stdin:
            # From the first work on: a side that started earlier has waited for the other one.
            meter = meter or CpuMeter(target)
            count = int(line)
            done = [act() for _ in range(count)] if count else meter.milliseconds(total)
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
