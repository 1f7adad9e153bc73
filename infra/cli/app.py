"""Commands and their options; what they do stands in files of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from infra.cli import chaos, hosts, jobs, maintenance, orders, pool, switch, worker

app = typer.Typer(
    name="berth",
    help="Berth: a worker of their own for every user's broker session.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys_app = typer.Typer(help="Key files.", no_args_is_help=True)
bench_app = typer.Typer(
    help="Measure on this machine. Each benchmark starts what it needs on free ports, and stops it.",
    no_args_is_help=True,
)
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")
app.add_typer(chaos.app, name="chaos")
app.add_typer(worker.app, name="worker")
app.add_typer(orders.app, name="orders")
app.add_typer(pool.app, name="pool")
app.add_typer(jobs.app, name="jobs")
app.add_typer(maintenance.app, name="maintenance")
app.add_typer(hosts.app, name="hosts")

#: Passed on unread: `berth exchange --help` shows the module's own help.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

DataFolder = Annotated[
    Path,
    typer.Option("--data", envvar="BERTH_DATA_DIR", help="Folder for everything.", show_default=".berth"),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"berth {version('berth')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    data: DataFolder = Path(".berth"),
    pool: Annotated[
        int | None,
        typer.Option(min=0, envvar="BERTH_POOL_TARGET", help="Warm workers to keep.", show_default="4"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(envvar="BERTH_API_PORT", help="Port of the API.", show_default="8000"),
    ] = None,
    ui_port: Annotated[
        int | None,
        typer.Option(envvar="BERTH_LOCAL_UI_PORT", help="Port of Temporal's UI.", show_default="8233"),
    ] = None,
    main_job: Annotated[
        bool, typer.Option("--main-job", help="Then register a demo user and send one order.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Stop after the main job: exit 0, or 1 with the reason.")
    ] = False,
) -> None:
    """Start the whole system on 127.0.0.1 and keep it up until Ctrl-C.

    Temporal, Valkey, PostgreSQL, the paper exchange, the node, the orchestrator, the API and a pool of warm
    workers. The other ports are settings (BERTH_LOCAL_…); .env.example lists them.
    """
    from infra.cli.up import run

    raise typer.Exit(run(data, pool=pool, port=port, ui_port=ui_port, main_job=main_job, once=once))


@app.command()
def down(
    data: DataFolder = Path(".berth"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing if nothing runs.")] = False,
) -> None:
    """Stop a running `berth up`, or what a killed one has left behind."""
    from infra.cli.down import run

    raise typer.Exit(run(data, quiet=quiet))


def _exec(module: str, *words: str) -> NoReturn:
    """Becomes `python -m module`: one process less, and signals reach it directly."""
    os.execv(sys.executable, [sys.executable, "-m", module, *words])  # noqa: S606


@app.command()
def api() -> None:
    """Run the REST API until SIGTERM or Ctrl-C.

    Settings: BERTH_API_HOST, BERTH_API_PORT, BERTH_API_PROCESSES, BERTH_DATABASE_URL, BERTH_VALKEY_URL,
    BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_PUBLIC_FILE, BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("api")


@app.command()
def orchestrator() -> None:
    """Run the orchestrator (workflows and activities) until SIGTERM or Ctrl-C.

    Settings: BERTH_TASK_QUEUES, BERTH_POOL_TARGET, BERTH_LAUNCHER, BERTH_NODE_SOCKET, BERTH_DATABASE_URL,
    BERTH_VALKEY_URL, BERTH_TEMPORAL_ADDRESS, BERTH_MASTER_KEY_FILE, BERTH_ORCHESTRATOR_KEY_FILE,
    BERTH_LOG_LEVEL; .env.example lists all.
    """
    _exec("activities")


@app.command(context_settings=_PASS_ON)
def exchange(context: typer.Context) -> None:
    """Run the paper exchange."""
    _exec("infra.exchange", *context.args)


@app.command(context_settings=_PASS_ON)
def node(context: typer.Context) -> None:
    """Run the node: it owns this host's worker processes."""
    _exec("infra.node", *context.args)


@keys_app.command("init")
def keys_init() -> None:
    """Make the key files that are missing; an existing one is never replaced.

    Paths: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_ORCHESTRATOR_KEY_FILE.
    """
    from infra.local import keyring
    from infra.settings import Settings
    from worker_runtime.protocol.errors import BerthError

    try:
        made = keyring.init(Settings())
    except (BerthError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    for path in made:
        typer.echo(f"made {path}")
    if not made:
        typer.echo("all key files are there")


@keys_app.command("rotate")
def keys_rotate(
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of a running `berth up`: rotate its key.")
    ] = None,
) -> None:
    """Make a new master key, rewrap all stored credentials, and say what to do next.

    Safe to interrupt and to run again; while an old key file is kept, it only goes on rewrapping. Without
    --data: BERTH_MASTER_KEY_FILE, BERTH_MASTER_PUBLIC_FILE, BERTH_MASTER_KEY_RETIRED, BERTH_DATABASE_URL.
    """
    from infra.cli.rotate import run

    raise typer.Exit(run(data))


Rate = Annotated[float, typer.Option(min=0.1, help="Claims per second, from a full pool.")]
RefillRate = Annotated[float, typer.Option(min=0.1, help="Claims per second while the pool is refilled.")]


@bench_app.command("claim")
def bench_claim(
    rate: Rate = 5.0,
    n: Annotated[int, typer.Option("-n", min=1, help="Claims from the full pool of as many.")] = 30,
    refill_rate: RefillRate = 2.0,
    refill_n: Annotated[int, typer.Option(min=1, help="Claims while the pool is refilled.")] = 40,
    json: JsonFile = None,
) -> None:
    """From REST to an Active worker with credentials, open loop, for users without a worker."""
    _bench({"claim": {"rate": rate, "n": n, "refill_rate": refill_rate, "refill_n": refill_n}}, json)


@bench_app.command("order")
def bench_order(
    n: Annotated[int, typer.Option("-n", min=1, help="Orders, one after the other.")] = 2000,
    users: Annotated[int, typer.Option(min=1, help="Users that trade at once in the second part.")] = 8,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long the second part takes, and each step of the third.")
    ] = 10.0,
    knee_users: Annotated[int, typer.Option(min=1, help="Users that trade in the third part.")] = 50,
    knee_first: Annotated[float, typer.Option(min=1, help="Orders per second of its first step.")] = 20.0,
    json: JsonFile = None,
) -> None:
    """From REST to the answer with an active worker; beside it the bare two Valkey hops.

    Then many users at growing rates, until the 99th percentile passes 50 ms.
    """
    knee = {"knee_users": knee_users, "knee_first": knee_first}
    _bench({"order": {"n": n, "users": users, "seconds": seconds, **knee}}, json)


@bench_app.command("memory")
def bench_memory(
    workers: Annotated[int, typer.Option(min=1, help="Idle workers in the pool.")] = 10,
    json: JsonFile = None,
) -> None:
    """Proportional set size of a worker with all its processes: idle in a pool, alone, and active."""
    _bench({"memory": {"workers": workers}}, json)


@bench_app.command("density")
def bench_density(
    workers: Annotated[int, typer.Option(min=1, help="Active workers, a container each.")] = 30,
    seconds: Annotated[float, typer.Option(min=1, help="How long orders are placed, twice.")] = 30.0,
    rate: Annotated[float, typer.Option(min=1, help="Orders per second, of all users together.")] = 30.0,
    json: JsonFile = None,
) -> None:
    """Memory, CPU and order latency of workers in containers, beside one that eats memory. Needs Docker."""
    _bench({"density": {"workers": workers, "seconds": seconds, "rate": rate}}, json)


@bench_app.command("recovery")
def bench_recovery(
    n: Annotated[int, typer.Option("-n", min=1, help="Workers killed, each of another user.")] = 40,
    replaced: Annotated[int, typer.Option(min=0, help="Further rounds: only the session is killed.")] = 8,
    frozen: Annotated[int, typer.Option(min=0, help="Further rounds: the session is stopped.")] = 3,
    json: JsonFile = None,
) -> None:
    """From kill -9 of a worker to Active again on another one, with a pool that is not empty."""
    _bench({"recovery": {"n": n, "replaced": replaced, "frozen": frozen}}, json)


def _numbers(text: str) -> list[int]:
    """`500,2000` as numbers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 500,2000")
    return numbers


@bench_app.command("idle")
def bench_idle(
    workers: Annotated[
        str, typer.Option(help="How many active users; several sizes: 500,2000.")
    ] = "500,2000",
    minutes: Annotated[float, typer.Option(min=0.05, help="How long they rest, and the peer runs.")] = 10.0,
    json: JsonFile = None,
) -> None:
    """Temporal actions and CPU of active users at rest; beside it a naive workflow that looks every minute.

    Each size takes twice the minutes, and the starts. Workers are simulated; all servers are real.
    """
    _bench({"idle": {"workers": _numbers(workers), "minutes": minutes}}, json)


@bench_app.command("heartbeat")
def bench_heartbeat(
    seconds: Annotated[
        float, typer.Option(min=5, help="How long each quota is held with each load.")
    ] = 300.0,
    quota: Annotated[
        str | None,
        typer.Option(help="CPU quotas, percent of one core (two CPUs or 95 % of a smaller host; then one)."),
    ] = None,
    load: Annotated[str, typer.Option(help="What is busy beside the worker.")] = "processes,threads",
    json: JsonFile = None,
) -> None:
    """Late renewals of a throttled worker whose broker call hangs; beside it a naive asyncio heartbeat.

    Needs the right to make a cgroup. Loads: 64 busy processes, 240 threads that hash megabytes.
    """
    loads = load.split(",")
    if not set(loads) <= {"processes", "threads"}:
        raise typer.BadParameter(f"{load!r}: loads are processes and threads")
    quotas = {} if quota is None else {"quotas": _numbers(quota)}
    _bench({"heartbeat": {"seconds": seconds, "loads": loads, **quotas}}, json)


@bench_app.command("claim-race")
def bench_claim_race(
    claims: Annotated[int, typer.Option(min=100, help="How many.")] = 1_000_000, json: JsonFile = None
) -> None:
    """Claims of killed claimers, with lost replies and messages that come twice; beside it bare ZPOPMIN."""
    _bench({"claim-race": {"claims": claims}}, json)


@bench_app.command("sweep")
def bench_sweep(
    workers: Annotated[str, typer.Option(help="How many workers; several sizes.")] = "1000,10000,20000",
    json: JsonFile = None,
) -> None:
    """A pass of maintenance over workers of which a tenth is odd. They are names; all servers are real."""
    _bench({"sweep": {"workers": _numbers(workers)}}, json)


@bench_app.command("jobs")
def bench_jobs(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each rate is measured.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, of which the median counts.")] = 3,
    runners: Annotated[str, typer.Option(help="How many runners; several: 1,2.")] = "1,2",
    pickups: Annotated[int, typer.Option(min=1, help="Jobs whose pick-up is measured, each alone.")] = 200,
    lease: Annotated[float, typer.Option(min=1, help="Seconds, of the runners that are killed.")] = 5.0,
    kills: Annotated[int, typer.Option(min=1, help="Runners that are killed.")] = 3,
    json: JsonFile = None,
) -> None:
    """The job runner beside RQ, huey and the floors. Needs the `bench` packages: rq and huey."""
    rates = {"seconds": seconds, "rounds": rounds, "runners": _numbers(runners), "pickups": pickups}
    _bench({"jobs": {**rates, "lease": lease, "kills": kills}}, json)


@bench_app.command("lease")
def bench_lease(
    seconds: Annotated[float, typer.Option(min=1, help="How long each design is watched.")] = 60.0,
    quota: Annotated[str, typer.Option(help="CPUs of the cgroup, in percent of one.")] = "200,100,25",
    load: Annotated[
        str, typer.Option(help="What is busy: 64 processes, or 240 threads of one process.")
    ] = "processes",
    json: JsonFile = None,
) -> None:
    """Late renewals and lost leases of a runner whose jobs use up a CPU quota.

    Beside it a renewing thread in the busy process, and an asyncio task in its loop. Needs the right to make
    a cgroup.
    """
    quotas = quota.split(",")
    if not set(quotas) <= {"200", "100", "25"} or load not in ("processes", "threads"):
        raise typer.BadParameter("quotas are 200, 100 and 25; loads are processes and threads")
    _bench({"lease": {"seconds": seconds, "quotas": quotas, "load": load}}, json)


@bench_app.command("all")
def bench_all(json: JsonFile = None) -> None:
    """All benchmarks, one after the other; the long ones in a short form."""
    _bench(
        {
            "claim": {},
            "order": {},
            "memory": {},
            "recovery": {"n": 12, "replaced": 4, "frozen": 1},
            "idle": {"workers": [100], "minutes": 1.0},
            "sweep": {"workers": [1000, 10_000]},
            "claim-race": {"claims": 50_000},
            "jobs": {"seconds": 1.0, "rounds": 1, "pickups": 60, "kills": 1},
            "lease": {"seconds": 20.0, "quotas": ["100"]},
            "heartbeat": {"seconds": 60.0, "loads": ["processes"]},
        },
        json,
    )


def _bench(wanted: dict[str, dict[str, Any]], json: Path | None) -> NoReturn:
    from infra.bench.run import run

    raise typer.Exit(run(wanted, json))


switch.install(app)


def main() -> None:
    app()
