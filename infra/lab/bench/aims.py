"""Says what each benchmark aims at, and whether it was met.

The aims are for 2 cores with nothing else on them. A benchmark that misses one ends with exit code
1, on a busy machine, too: the figures say by how much. An aim is changed only by an issue that says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from infra.lab import figures
from infra.lab.bench.jobs import contenders, crashes

Result = Mapping[str, Any]


class NotMeasured(Exception):
    """The options of a run left this out."""


class Aim(NamedTuple):
    what: str
    limit: float
    #: Finds the measured figure. `NotMeasured` says that the options left it out; with any other
    #: error, such as of a key that was renamed, the aim is missed.
    figure: Callable[[Result], float]
    #: The limit is the least that is good, not the most.
    least: bool = False


AIMS: dict[str, tuple[Aim, ...]] = {
    "claim": (
        Aim("from a full pool, p50 (ms)", 60, lambda result: result["p50_ms"]),
        Aim("from a full pool, p99 (ms)", 250, lambda result: result["p99_ms"]),
        Aim("with refill, p50 (ms)", 60, lambda result: result["refill"]["p50_ms"]),
        Aim("with refill, p99 (ms)", 250, lambda result: result["refill"]["p99_ms"]),
        Aim("double claims", 0, lambda result: result["double_claims"]),
    ),
    "order": (
        Aim("p50 (ms)", 6, lambda result: result["p50_ms"]),
        Aim("p99 (ms)", 25, lambda result: result["p99_ms"]),
        Aim("p50, times the floor's", 12, lambda result: result["p50_ms"] / result["floor_p50_ms"]),
        Aim("p99, times the floor's", 40, lambda result: result["p99_ms"] / result["floor_p99_ms"]),
        Aim(
            "refused after a rejected login, p99 (ms)",
            20,
            lambda result: result["login_rejected"]["p99_ms"],
        ),
    ),
    "beside": (Aim("p50, times the other checkout's", 1.05, lambda result: result["ratio"]),),
    "waits": (
        Aim("API, for PostgreSQL, p99 (ms)", 500, lambda result: result["api"]["database_p99_ms"]),
        Aim("API, for Valkey, p99 (ms)", 500, lambda result: result["api"]["valkey_p99_ms"]),
        Aim(
            "orchestrator, for PostgreSQL, p99 (ms)",
            500,
            lambda result: result["orchestrator"]["database_p99_ms"],
        ),
        Aim(
            "orchestrator, for Valkey, p99 (ms)",
            500,
            lambda result: result["orchestrator"]["valkey_p99_ms"],
        ),
    ),
    "flood": (
        Aim("worst p99 of orders, times the quiet one", 2, lambda result: result["worst_ratio"]),
    ),
    "memory": (
        Aim("an idle worker of the pool (MiB)", 30, lambda result: result["idle_pss_mib"]),
        Aim("an idle worker alone (MiB)", 45, lambda result: result["idle_alone_pss_mib"]),
    ),
    "density": (Aim("workers lost", 0, lambda result: result["workers_lost"]),),
    "recovery": (
        Aim("kill -9 to Active again, p50 (s)", 2, lambda result: result["p50_s"]),
        Aim("kill -9 to Active again, p99 (s)", 5, lambda result: result["p99_s"]),
        Aim(
            "session stopped to Active again, beyond the pulse timeout, p50 (s)",
            1.5,
            lambda result: (
                _chosen(result["in_place"], "frozen")["p50_s"] - result["pulse_timeout_s"]
            ),
        ),
        Aim(
            "replaced because their host stood still",
            0,
            lambda result: _chosen(result, "stall")["replaced"],
        ),
    ),
    "idle": (
        Aim(
            "actions of a worker-hour at rest",
            6,
            lambda result: max(size["actions_per_hour"] for size in result["sizes"].values()),
        ),
        Aim("actions of a worker-hour in use", 6, lambda result: result["used_actions_per_hour"]),
    ),
    "heartbeat": (Aim("late renewals", 0, lambda result: result["late"]),),
    "claim-race": (
        Aim("double claims", 0, lambda result: result["double"]),
        Aim("lost workers", 0, lambda result: result["lost"]),
        Aim("claims a second", 2000, lambda result: result["per_s"], least=True),
    ),
    "maintenance": (
        Aim("scan of 10,000 workers (s)", 1, lambda result: _size(result, "10000")["scan_s"]),
        Aim(
            "whole pass over 10,000 workers (s)",
            3,
            lambda result: _size(result, "10000")["total_s"],
        ),
        Aim(
            "whole pass over 20,000 workers, times that over 10,000",
            2.3,
            lambda result: _size(result, "20000")["total_s"] / _size(result, "10000")["total_s"],
        ),
    ),
    "tiers": (
        Aim(
            "pick-up during a flood of another tier, worst p99 (ms)",
            50,
            lambda result: result["worst_p99_ms"],
        ),
    ),
    "jobs": (
        Aim(
            "a fresh child each, times RQ",
            4,
            lambda result: min(result["times_rq"]["fresh"].values()),
            True,
        ),
        Aim(
            "100 jobs a child, times RQ",
            40,
            lambda result: min(result["times_rq"]["recycled"].values()),
            True,
        ),
        Aim(
            "100 jobs a child, times the fastest peer that keeps jobs",
            1,
            lambda result: min(_times_fastest_keeper(result).values()),
            least=True,
        ),
        Aim(
            "pick-up by a fresh child, p50 (ms)",
            4,
            lambda result: _chosen(result["fresh"], "1")["p50_ms"],
        ),
        Aim(
            "pick-up, 100 jobs a child, p50 (ms)",
            1.5,
            lambda result: _chosen(result["recycled"], "1")["p50_ms"],
        ),
        Aim(
            "pick-up, 100 jobs a child, p99 (ms)",
            5,
            lambda result: _chosen(result["recycled"], "1")["p99_ms"],
        ),
        Aim(
            "kill -9 to the next start, beyond the lease (s)",
            1,
            lambda result: _beyond_lease(result),
        ),
        Aim("an idle runner with its child (MiB)", 30, lambda result: result["idle_pss_mib"]),
    ),
    "job-crashes": (
        *(
            Aim(
                f"lost jobs, {fault}",
                0,
                lambda result, fault=fault: _worst(result, "lost", (fault,)),  # type: ignore[misc]
            )
            for fault in crashes.FAULTS
        ),
        Aim(
            "doubled jobs but for a freeze",
            0,
            lambda result: _worst(result, "doubled", crashes.FAULTS[:-1]),
        ),
    ),
    "own-jobs": (
        Aim(
            "jobs a second that a direct producer enqueues",
            20_000,
            lambda result: result["direct_per_s"],
            least=True,
        ),
        *(
            Aim(
                f"built-in types, times as quick as own ones, {title}",
                1.1,
                lambda result, way=way: result[way]["ratio"],  # type: ignore[misc]
            )
            for way, title in (("fresh", "a fresh child each"), ("recycled", "100 jobs a child"))
        ),
        Aim(
            "a claim while many jobs wait, times one while few do",
            1.3,
            lambda result: result["claim_ratio"],
        ),
    ),
    "lease": tuple(
        Aim(
            f"lost leases at {quota} % of a CPU",
            0,
            lambda result, quota=quota: _chosen(result, quota)["lost"],  # type: ignore[misc]
        )
        for quota in ("200", "100", "25")
    ),
}


def _chosen(parts: Result, name: str) -> Any:
    """Return a part of a result that the options choose. Raises `NotMeasured`."""
    if name not in parts:
        raise NotMeasured(name)
    return parts[name]


def _size(result: Result, workers: str) -> Any:
    return _chosen(result["sizes"], workers)


def _times_fastest_keeper(result: Result) -> Mapping[str, float]:
    """Return our rates, times that of the fastest peer: known if all peers were measured. Raises
    `NotMeasured`."""
    for peer in contenders.OTHER_PEERS:
        _chosen(result["peers"], peer)
    times: Mapping[str, float] = result["times_fastest_keeper"]
    return times


def _worst(result: Result, figure: str, faults: Sequence[str]) -> float:
    """Return the largest such figure of our runner. Raises `NotMeasured` if a fault was left
    out."""
    ours = result["matrix"][crashes.OURS]
    return float(max(_chosen(ours, fault)[figure] for fault in faults))


def _beyond_lease(result: Result) -> float:
    return float(max(result["rerun_s"]) - result["lease_s"])


def judge(aims: Sequence[Aim], result: Result) -> list[dict[str, Any]]:
    """Return the aims of a benchmark with what it measured, without those that its options left
    out.

    An aim whose figure is not where it should be is missed, and has the figure None.
    """
    judged = []
    for aim in aims:
        figure: float | None
        try:
            figure = round(float(aim.figure(result)), 3)
            met = figure >= aim.limit if aim.least else figure <= aim.limit
        except NotMeasured:
            continue
        except (LookupError, TypeError, ValueError, ArithmeticError):
            figure, met = None, False
        judged.append(
            {"what": aim.what, "limit": aim.limit, "least": aim.least, "figure": figure, "met": met}
        )
    return judged


def describe(judged: Mapping[str, Any]) -> str:
    """Return a judged aim as a line: what, its limit, and the figure."""
    aim = f"{judged['what']}: {_limit(judged['limit'], judged['least'])}"
    if judged["figure"] is None:
        return f"{aim}, but the result has no such figure: its key may have another name now"
    return f"{aim}, measured {judged['figure']:g}"


def _limit(limit: float, least: bool) -> str:
    return f"{'at least' if least else 'at most'} {limit:g}"


def table(name: str, aims: Sequence[Aim], judged: Sequence[Mapping[str, Any]]) -> None:
    """Print all aims of a benchmark; of those that its options left out, that they were not
    measured."""
    known = {aim["what"]: aim for aim in judged}
    rows = []
    for aim in aims:
        verdict = "not measured"
        if aim.what in known:
            figure, met = known[aim.what]["figure"], known[aim.what]["met"]
            shown = "no figure" if figure is None else f"{figure:g}"
            verdict = f"{shown}, {'met' if met else 'missed'}"
        rows.append((f"{aim.what}: {_limit(aim.limit, aim.least)}", verdict))
    figures.print_table(f"{name}: aims, on 2 quiet cores", rows)
