"""`berth bench …`: the commands and their options. What they measure is imported when they run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    help="Measure on this machine. Each benchmark starts what it needs on free ports, stops "
    "it, and says "
    "whether its aims were met. The exit code is 1 if one was missed.",
    no_args_is_help=True,
)

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures to this file.")
]
UpdateDocs = Annotated[
    bool,
    typer.Option(help="Also write the figures to docs/measured.md, with this commit and the date."),
]
PeersFolder = Annotated[
    Path | None,
    typer.Option(
        "--peers", help="Folder of a Python environment with the peers; made if it is not there."
    ),
]
Rate = Annotated[float, typer.Option(min=0.1, help="Claims per second, from a full pool.")]
RefillRate = Annotated[
    float, typer.Option(min=0.1, help="Claims per second while the pool is refilled.")
]


@app.command("claim")
def bench_claim(
    rate: Rate = 5.0,
    n: Annotated[int, typer.Option("-n", min=1, help="Claims from the full pool of as many.")] = 30,
    refill_rate: RefillRate = 2.0,
    refill_n: Annotated[int, typer.Option(min=1, help="Claims while the pool is refilled.")] = 40,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure from REST to an Active worker with credentials, open loop, for users without a
    worker."""
    _bench(
        {"claim": {"rate": rate, "n": n, "refill_rate": refill_rate, "refill_n": refill_n}},
        json,
        update_docs,
    )


@app.command("order")
def bench_order(
    n: Annotated[int, typer.Option("-n", min=1, help="Orders, one after the other.")] = 2000,
    users: Annotated[
        int, typer.Option(min=1, help="Users that trade at once in the second part.")
    ] = 8,
    seconds: Annotated[
        float,
        typer.Option(min=1, help="How long the second part takes, and each step of the third."),
    ] = 10.0,
    knee_users: Annotated[
        int, typer.Option(min=1, help="Users that trade in the third part.")
    ] = 50,
    knee_first: Annotated[
        float, typer.Option(min=1, help="Orders per second of its first step.")
    ] = 20.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure from REST to the answer with an active worker; compare with two bare Valkey hops.

    Then many users at growing rates, until the 99th percentile passes 50 ms.
    """
    knee = {"knee_users": knee_users, "knee_first": knee_first}
    _bench({"order": {"n": n, "users": users, "seconds": seconds, **knee}}, json, update_docs)


@app.command("beside")
def bench_beside(
    checkout: Annotated[
        str, typer.Argument(help="Another checkout of Berth: the state before a change.")
    ],
    work: Annotated[str, typer.Option(help="What is measured: order or claim.")] = "order",
    blocks: Annotated[
        int | None, typer.Option(min=1, help="By turns: 80 of 25 orders each, or 60 claims.")
    ] = None,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure orders or claims of another checkout and of this one, by turns, on a machine that is
    never quiet."""
    if work not in ("order", "claim"):
        raise typer.BadParameter(f"{work!r} is neither order nor claim")
    _bench({"beside": {"checkout": checkout, "work": work, "blocks": blocks}}, json, update_docs)


@app.command("waits")
def bench_waits(
    users: Annotated[int, typer.Option(min=1, help="Users that trade at once.")] = 8,
    readers: Annotated[int, typer.Option(min=1, help="Connections that list orders at once.")] = 32,
    starts: Annotated[int, typer.Option(min=1, help="Users that get a worker meanwhile.")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 20.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Waits of API and orchestrator for connections to PostgreSQL and Valkey, under load."""
    _bench(
        {"waits": {"users": users, "readers": readers, "starts": starts, "seconds": seconds}},
        json,
        update_docs,
    )


@app.command("flood")
def bench_flood(
    seconds: Annotated[float, typer.Option(min=1, help="How long each part takes.")] = 20.0,
    orders: Annotated[float, typer.Option(min=1, help="Orders per second.")] = 40.0,
    requests: Annotated[
        float, typer.Option(min=1, help="Requests with a bad key per second.")
    ] = 1000.0,
    connections: Annotated[int, typer.Option(min=1, help="Connections that they come over.")] = 16,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure orders during requests with keys that are malformed or made up; compare with quiet
    times."""
    flood = {"seconds": seconds, "orders": orders, "requests": requests, "connections": connections}
    _bench({"flood": flood}, json, update_docs)


@app.command("memory")
def bench_memory(
    workers: Annotated[int, typer.Option(min=1, help="Idle workers in the pool.")] = 10,
    settle: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds until a fresh worker counts as one that no longer grows."
        ),
    ] = 8.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure the proportional set size of a worker with all its processes: idle in a pool, alone,
    and active."""
    _bench({"memory": {"workers": workers, "settle": settle}}, json, update_docs)


@app.command("density")
def bench_density(
    workers: Annotated[int, typer.Option(min=1, help="Active workers, a container each.")] = 30,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long orders are placed, twice.")
    ] = 30.0,
    rate: Annotated[
        float, typer.Option(min=1, help="Orders per second, of all users together.")
    ] = 30.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure memory, CPU and order latency of workers in containers, while another one eats
    memory. Needs Docker."""
    _bench({"density": {"workers": workers, "seconds": seconds, "rate": rate}}, json, update_docs)


@app.command("recovery")
def bench_recovery(
    n: Annotated[int, typer.Option("-n", min=1, help="Workers killed, each of another user.")] = 40,
    replaced: Annotated[
        int, typer.Option(min=0, help="Further rounds: only the session is killed.")
    ] = 8,
    frozen: Annotated[int, typer.Option(min=0, help="Further rounds: the session is stopped.")] = 3,
    stalled: Annotated[
        int, typer.Option(min=0, help="Users whose host stands still for 6 s.")
    ] = 10,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure from kill -9 of a worker to Active again on another one, with a pool that is not
    empty."""
    rounds = {"n": n, "replaced": replaced, "frozen": frozen, "stalled": stalled}
    _bench({"recovery": rounds}, json, update_docs)


def _numbers(text: str) -> list[int]:
    """Returns `500,2000` as numbers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 500,2000")
    return numbers


@app.command("idle")
def bench_idle(
    workers: Annotated[
        str, typer.Option(help="How many active users; several sizes: 500,2000.")
    ] = "500,2000",
    minutes: Annotated[
        float, typer.Option(min=0.05, help="How long they rest, and the peer runs.")
    ] = 10.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure Temporal actions and CPU of active users at rest; compare with a workflow that polls
    every minute.

    Each size takes twice the minutes, and the starts. Workers are simulated; all servers are real.
    """
    _bench({"idle": {"workers": _numbers(workers), "minutes": minutes}}, json, update_docs)


@app.command("heartbeat")
def bench_heartbeat(
    seconds: Annotated[
        float, typer.Option(min=5, help="How long each quota is held with each load.")
    ] = 300.0,
    quota: Annotated[
        str | None,
        typer.Option(
            help="CPU quotas, percent of one core (two CPUs or 95 % of a smaller host; then one)."
        ),
    ] = None,
    load: Annotated[str, typer.Option(help="What keeps the CPUs busy.")] = "processes,threads",
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Count late renewals of a throttled worker whose broker call hangs; compare with a naive
    asyncio heartbeat.

    Needs the right to make a cgroup. Loads: 64 busy processes, 240 threads that hash megabytes.
    """
    loads = load.split(",")
    if not set(loads) <= {"processes", "threads"}:
        raise typer.BadParameter(f"{load!r}: loads are processes and threads")
    quotas = {} if quota is None else {"quotas": _numbers(quota)}
    _bench({"heartbeat": {"seconds": seconds, "loads": loads, **quotas}}, json, update_docs)


@app.command("claim-race")
def bench_claim_race(
    claims: Annotated[int, typer.Option(min=100, help="How many.")] = 1_000_000,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Claims of killed claimers, with lost replies and repeated messages, compared with bare
    ZPOPMIN."""
    _bench({"claim-race": {"claims": claims}}, json, update_docs)


@app.command("maintenance")
def bench_maintenance(
    workers: Annotated[
        str, typer.Option(help="How many workers; several sizes.")
    ] = "1000,10000,20000",
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure a pass of maintenance over workers of which a tenth is odd. They are names; all
    servers are real."""
    _bench({"maintenance": {"workers": _numbers(workers)}}, json, update_docs)


@app.command("jobs")
def bench_jobs(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each rate is measured.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the median counts.")] = 3,
    runners: Annotated[str, typer.Option(help="How many runners; several: 1,2.")] = "1,2",
    pickups: Annotated[
        int, typer.Option(min=1, help="Jobs whose pick-up is measured, each alone.")
    ] = 200,
    lease: Annotated[
        float, typer.Option(min=1, help="Seconds, of the runners that are killed.")
    ] = 5.0,
    kills: Annotated[int, typer.Option(min=1, help="Runners that are killed.")] = 3,
    peers: PeersFolder = None,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure the job runner; compare with RQ, huey and the floors. Needs the `bench` packages: rq
    and huey.

    With --peers also with dramatiq, arq and procrastinate, which pip installs there.
    """
    rates = {"seconds": seconds, "rounds": rounds, "runners": _numbers(runners), "pickups": pickups}
    crashes = {"lease": lease, "kills": kills}
    _bench({"jobs": {**rates, **crashes, "peers": _python_of(peers)}}, json, update_docs)


@app.command("job-crashes")
def bench_job_crashes(
    peers: PeersFolder = None,
    jobs: Annotated[int, typer.Option(min=5, help="Jobs for each fault.")] = 12,
    lease: Annotated[float, typer.Option(min=1, help="Seconds, of our runners.")] = 5.0,
    frozen: Annotated[float, typer.Option(min=0, help="Seconds of a freeze.")] = 12.0,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds after which a job counts as lost.")
    ] = 120.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Count lost, doubled and late jobs after kill -9 of a runner, a child and the server, and a
    freeze.

    With --peers also of RQ, huey, dramatiq, arq and procrastinate, which pip installs there.
    """
    times = {"lease": lease, "frozen": frozen, "patience": patience}
    _bench({"job-crashes": {"peers": _python_of(peers), "jobs": jobs, **times}}, json, update_docs)


def _python_of(peers: Path | None) -> str:
    """Returns the interpreter of the peers' environment, which is made if need be."""
    from infra.lab.bench.jobs.peer_environment import peers_python

    return "" if peers is None else peers_python(peers)


@app.command("own-jobs")
def bench_own_jobs(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each rate is measured.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the median counts.")] = 5,
    enqueued: Annotated[
        int, typer.Option(min=1, help="Jobs that a direct producer enqueues in a round.")
    ] = 20_000,
    few: Annotated[int, typer.Option(min=100, help="Jobs that wait in the short queue.")] = 1_000,
    many: Annotated[int, typer.Option(min=101, help="Jobs that wait in the long queue.")] = 500_000,
    claims: Annotated[
        int, typer.Option(min=20, help="Claims from each queue; fewer than wait in the short one.")
    ] = 800,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure own job types compared with built-in ones, direct enqueues, and claims while many
    jobs wait."""
    if claims > few - 100 or few >= many:
        raise typer.BadParameter(
            "claims are at least 100 fewer than --few, and --few less than --many"
        )
    rates = {"seconds": seconds, "rounds": rounds, "enqueued": enqueued}
    _bench({"own-jobs": {**rates, "few": few, "many": many, "claims": claims}}, json, update_docs)


@app.command("tiers")
def bench_tiers(
    seconds: Annotated[float, typer.Option(min=1, help="How long each part takes.")] = 20.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Jobs per second of each tier.")] = 10.0,
    flood: Annotated[int, typer.Option(min=1, help="Jobs that wait in the flooded tier.")] = 20_000,
    flood_rate: Annotated[
        float, typer.Option(min=1, help="Further ones that come each second.")
    ] = 200.0,
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Measure how soon jobs are picked up while another tier is flooded; compare with runners that
    tiers share."""
    _bench(
        {"tiers": {"seconds": seconds, "rate": rate, "flood": flood, "flood_rate": flood_rate}},
        json,
        update_docs,
    )


@app.command("lease")
def bench_lease(
    seconds: Annotated[float, typer.Option(min=1, help="How long each design is watched.")] = 60.0,
    quota: Annotated[
        str, typer.Option(help="CPUs of the cgroup, in percent of one.")
    ] = "200,100,25",
    load: Annotated[
        str, typer.Option(help="What is busy: 64 processes, or 240 threads of one process.")
    ] = "processes",
    json: JsonFile = None,
    update_docs: UpdateDocs = False,
) -> None:
    """Count late renewals and lost leases of a runner whose jobs use up a CPU quota.

    Compared with a renewing thread in the busy process, and an asyncio task in its loop. Needs the
    right to make a cgroup.
    """
    quotas = quota.split(",")
    if not set(quotas) <= {"200", "100", "25"} or load not in ("processes", "threads"):
        raise typer.BadParameter("quotas are 200, 100 and 25; loads are processes and threads")
    _bench({"lease": {"seconds": seconds, "quotas": quotas, "load": load}}, json, update_docs)


@app.command("all")
def bench_all(json: JsonFile = None, update_docs: UpdateDocs = False) -> None:
    """Run all benchmarks, one after the other; the long ones in a short form."""
    _bench(
        {
            "claim": {},
            "order": {},
            "waits": {},
            "flood": {"seconds": 10.0},
            "memory": {},
            "recovery": {"n": 12, "replaced": 4, "frozen": 1, "stalled": 5},
            "idle": {"workers": [100], "minutes": 1.0},
            "maintenance": {"workers": [10_000, 20_000]},
            "claim-race": {"claims": 50_000},
            "jobs": {"seconds": 1.0, "rounds": 1, "pickups": 60, "kills": 1},
            "own-jobs": {"seconds": 1.0, "rounds": 1},
            "tiers": {"seconds": 10.0},
            "lease": {"seconds": 20.0, "quotas": ["100"]},
            "heartbeat": {"seconds": 60.0, "loads": ["processes"]},
        },
        json,
        update_docs,
    )


def _bench(benchmarks: dict[str, dict[str, Any]], json: Path | None, update_docs: bool) -> NoReturn:
    from infra.lab.bench.suite import run_benchmarks

    raise typer.Exit(
        run_benchmarks(benchmarks, json, command=_command(sys.argv), update_docs=update_docs)
    )


def _command(argv: list[str]) -> str:
    """Return the command as it was given, without what says where its figures go, and without
    folders of this machine: `FOLDER` stands for each."""
    words = iter(argv[1:])
    kept = ["berth"]
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--json":
            if not equals:
                next(words, None)
        elif option not in ("--update-docs", "--no-update-docs"):
            if not Path(value or word).is_absolute():
                kept.append(word)
            else:
                kept.append(f"{option}=FOLDER" if equals else "FOLDER")
    return shlex.join(kept)
