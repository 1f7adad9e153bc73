"""`berth bench claim-race`: a million claims from killed claimers;
none is double, and no worker is lost.

The scripts are those of the claim path, with real Valkey; workers are fake, without processes.
Eight claimers send claims twice, lose replies and connections, and die by kill -9 again and again;
a successor repeats what its predecessor had not written down. Workers get messages twice, or never:
such a claim is released in the end, and its message then arrives too late. Afterwards the claimers'
ledgers are compared with what each worker knows.

Then the rate: claims from a full pool,
compared with bare ZPOPMIN by the same clients on the same server.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from infra.lab import figures
from infra.lab.bench.claim_race import claim_ledger, popper
from infra.lab.bench.claim_race.claim_ledger import OPEN, ClaimLedger
from infra.lab.bench.claim_race.claimer import forgotten
from infra.lab.bench.claim_race.fake_workers import BATCH_SIZE, ConfirmedClaims, FakeWorkers
from infra.lab.figures import Say, silent
from infra.lab.target import own_folder
from infra.local.process import ServerFailed
from infra.local.servers import ValkeyServer
from infra.processes import end_with_parent
from worker_runtime.protocol import keys, scripts

CLAIMER_PROCESSES = 8
#: Most claims in the part that measures the rate.
MAX_RATED_CLAIMS = 200_000
#: Seconds between two kills; a claimer starts in 0.3 s.
KILL_INTERVAL_S = 1.0
#: Claims that must be made between two kills:
#: on a busy machine a start takes longer than the period.
MIN_CLAIMS_PER_KILL = 200
_SCRIPTS = (scripts.ANNOUNCE_WORKER, scripts.ADMIT_WORKER, scripts.CLAIM, scripts.SETTLE_CLAIM)


@dataclass
class _Race:
    """Claimers that are started again when they were killed."""

    url: str
    folder: Path
    ledgers: list[ClaimLedger]
    kill_period: float
    kills: int = 0

    def __post_init__(self) -> None:
        self._dice = random.Random(1)  # noqa: S311 — nothing secret about it
        self._running = {number: self._start(number) for number in range(len(self.ledgers))}
        self._kill_at = time.monotonic() + self.kill_period
        self._kill_after = MIN_CLAIMS_PER_KILL

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        words = (
            self.url,
            str(self.folder / f"ledger-{number}"),
            str(number),
            str(self._dice.random())[2:],
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "infra.lab.bench.claim_race.claimer", *words],
            preexec_fn=end_with_parent(os.getpid()),
        )

    def going(self) -> bool:
        """Kills and restarts claimers. Returns whether one still claims. Raises `ServerFailed`."""
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[number]
            if code == -signal.SIGKILL:
                self._running[number] = self._start(number)
            elif code != 0:
                raise ServerFailed(f"claimer {number} ended with {code}")
        done = sum(ledger.done() for ledger in self.ledgers)
        if self._running and time.monotonic() > self._kill_at and done >= self._kill_after:
            self._kill_at = time.monotonic() + self.kill_period
            self._kill_after = done + MIN_CLAIMS_PER_KILL
            self._dice.choice(list(self._running.values())).kill()
            self.kills += 1
        return bool(self._running)

    def end(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait(10)


def run(
    claims: int = 1_000_000, kill_period: float = KILL_INTERVAL_S, say: Say = silent
) -> dict[str, Any]:
    """Kills a claimer every `kill_period` seconds.

    Raises `ServerFailed` when a claimer got two workers for one claim, or none at all.
    """
    with (
        own_folder() as folder,
        ValkeyServer(folder / "valkey", durable=False) as server,
        Redis.from_url(server.url) as client,
    ):
        for script in _SCRIPTS:
            client.script_load(script.source)
        raced = _race(server.url, client, folder, claims, kill_period, say)
        client.flushall()
        rated = min(claims, MAX_RATED_CLAIMS)
        floor = _rate(server.url, client, "pop", rated, say)
        ours = _rate(server.url, client, "claim", rated, say)
    return {
        "claims": claims,
        **raced,
        "per_s": ours["per_s"],
        "floor_per_s": floor["per_s"],
        "per_core_s": ours["per_core_s"],
        "floor_per_core_s": floor["per_core_s"],
        "rated": rated,
    }


def _race(
    url: str, client: Redis, folder: Path, claims: int, kill_period: float, say: Say
) -> dict[str, Any]:
    share = -(-claims // CLAIMER_PROCESSES)
    sizes = [min(share, claims - start) for start in range(0, claims, share)]
    ledgers = [ClaimLedger(folder / f"ledger-{number}", size) for number, size in enumerate(sizes)]
    workers = FakeWorkers(client, keep=min(2000, max(64, claims // 20)))
    began = time.monotonic()
    race = _Race(url, folder, ledgers, kill_period)
    try:
        workers.serve(_telling(race, ledgers, claims, say))
        seconds = time.monotonic() - began
        say("claim-race: comparing the ledgers")
        return {
            **_judged(client, ledgers, workers),
            "kills": race.kills,
            "race_s": round(seconds, 1),
        }
    finally:
        race.end()
        for ledger in ledgers:
            ledger.__exit__(None, None, None)


def _telling(race: _Race, ledgers: list[ClaimLedger], claims: int, say: Say) -> Callable[[], bool]:
    def going() -> bool:
        say(
            f"claim-race: {sum(ledger.done() for ledger in ledgers)} of {claims} claims, "
            f"{race.kills} kills"
        )
        return race.going()

    return going


def _judged(client: Redis, ledgers: list[ClaimLedger], workers: FakeWorkers) -> dict[str, int]:
    """Compares what claimers know with what workers know."""
    truth = workers.truth
    claimed = bytearray(truth.announced + 1)
    double, unconfirmed = 0, []
    for claimer, ledger in enumerate(ledgers):
        for claim, worker in enumerate(ledger.workers):
            if worker == OPEN or claimed[worker]:
                double += 1
                continue
            claimed[worker] = 1
            if truth.by[worker] == (claimer << 40) + claim + 1:
                continue
            if forgotten(claim) and not truth.confirmed[worker]:
                unconfirmed.append((worker, claim_ledger.claim_id(claimer, claim)))
            else:
                double += 1
    double += sum(count > 1 for count in truth.confirmed)
    double += workers.release(unconfirmed)
    return {
        "double": double,
        "lost": _lost(client, truth, claimed),
        "released": truth.released,
        "repeated": truth.repeated,
        "workers": truth.announced,
    }


def _lost(client: Redis, truth: ConfirmedClaims, claimed: bytearray) -> int:
    """Counts workers that nobody has and nobody can get."""
    free: Any = client.zrange(keys.pool_ready(claim_ledger.POOL), 0, -1)
    known = {claim_ledger.number_of(worker_id) for worker_id in free}
    return sum(
        1 for worker in range(1, truth.announced + 1) if not claimed[worker] and worker not in known
    )


def _rate(url: str, client: Redis, act: str, count: int, say: Say) -> dict[str, float]:
    """Claims (or bare pops) a second from a full pool, all clients at once."""
    say(f"claim-race: {count} free workers")
    client.flushall()  # the workers of before have the same ids
    workers = FakeWorkers(client, keep=BATCH_SIZE)
    for start in range(0, count, BATCH_SIZE):
        workers.announce(min(BATCH_SIZE, count - start))
    share = -(-count // CLAIMER_PROCESSES)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                popper.__name__,
                url,
                act,
                str(first),
                str(min(share, count - first)),
            ],
            stdout=subprocess.PIPE,
            preexec_fn=end_with_parent(os.getpid()),
        )
        for first in range(0, count, share)
    ]
    try:
        while _waiting(client) < len(processes):
            if any(process.poll() is not None for process in processes):
                raise ServerFailed("a claimer did not start")
            time.sleep(0.02)
        say(
            f"claim-race: {count} claims at full speed"
            if act == "claim"
            else f"claim-race: {count} pops"
        )
        before = _cpu(client)
        client.rpush(popper.GO, *range(len(processes)))
        took = []
        for process in processes:
            printed, _ = process.communicate(timeout=600)
            if process.returncode:
                raise ServerFailed("the pool was empty too early")
            took.append(float(printed))
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    spent = _cpu(client) - before
    return {"per_s": round(count / max(took)), "per_core_s": round(count / max(spent, 0.001))}


def _waiting(client: Redis) -> int:
    info: Any = client.info("clients")
    return int(info["blocked_clients"])


def _cpu(client: Redis) -> float:
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def table(result: dict[str, Any]) -> None:
    figures.print_table(
        f"claim-race: {result['claims']} claims of {CLAIMER_PROCESSES} claimers, "
        f"{result['kills']} of them killed",
        [
            ("double", str(result["double"])),
            ("lost", str(result["lost"])),
            (
                "on the way",
                f"{result['repeated']} messages twice   {result['released']} claims released "
                f"that nobody confirmed   {result['race_s']} s",
            ),
            (
                "claims a second",
                f"{result['per_s']}   a second of Valkey's CPU {result['per_core_s']}",
            ),
            (
                "floor: bare ZPOPMIN",
                f"{result['floor_per_s']}   a second of Valkey's CPU {result['floor_per_core_s']}",
            ),
        ],
    )
