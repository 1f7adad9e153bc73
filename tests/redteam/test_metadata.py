"""What an attacker reaches by metadata: nothing forged is believed, and no healthy worker is
stopped for it.

Deleting a mark is another matter: anyone who can write to Valkey can do that, and so have a worker
replaced.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from activities.maintenance.anomalies import AnomalyKind, OverdueLimits, find_anomalies
from activities.maintenance.scan import FleetScanner
from infra.database.workers.passes import Suspect
from infra.valkey.client import reply_of
from infra.vault.message_secret import MessageSecrets
from infra.vault.secret_versions import new_version
from tests.support.activities.harness import ActivityHarness
from tests.support.workers.pool_worker import POOL
from worker_runtime.protocol import keys
from worker_runtime.protocol.worker_reports import VALID_UNTIL, sign_metadata
from workflows.user_worker.messages import CheckWorker, WorkerRef

#: Seconds. The worker was used a minute ago; the forger says an hour.
USED, FORGED = 60.0, 3600.0


async def victim(harness: ActivityHarness) -> tuple[str, WorkerRef]:
    """A user with an Active worker, which was used a minute ago."""
    user, worker = await harness.user(), await harness.worker()
    result, _ = await asyncio.gather(
        harness.run(harness.claiming.claim_worker, harness.claim(user, f"claim-{user}")),
        worker.serve(),
    )
    ref = result.worker
    assert ref is not None
    await harness.renew_mark(
        user,
        ref.worker_id,
        ref.epoch,
        state="Active",
        last_activity_ms=int((time.time() - USED) * 1000),
    )
    return user, ref


def shown(ref: WorkerRef, state: str = "Draining") -> dict[str, str | int]:
    return {
        "epoch": ref.epoch,
        "worker": ref.worker_id,
        "state": state,
        "last_activity_ms": int((time.time() - FORGED) * 1000),
        VALID_UNTIL: int((time.time() + 3600) * 1000),
    }


async def forge(harness: ActivityHarness, user: str, ref: WorkerRef, how: str) -> None:
    """Says that the worker drains, and was last used an hour ago."""
    fields, own = shown(ref), harness.secrets.assignment_keys(user, ref.epoch)
    match how:
        case "altered":
            fields = {name: fields[name] for name in ("state", "last_activity_ms")}
        case "by another user":
            fields = sign_metadata(
                fields, user, harness.secrets.assignment_keys("attacker", ref.epoch)
            )
        case "of another epoch":
            fields = sign_metadata(
                fields, user, harness.secrets.assignment_keys(user, ref.epoch + 1)
            )
        case "of another secret":
            stranger = MessageSecrets([new_version(1)])
            fields = sign_metadata(fields, user, stranger.assignment_keys(user, ref.epoch))
        case "an earlier state":
            past = {**fields, VALID_UNTIL: int((time.time() - 2) * 1000)}
            fields = sign_metadata(past, user, own)
        case "of another worker":
            fields = sign_metadata({**fields, "worker": "another"}, user, own)
    words = [word for field in fields.items() for word in field]
    await reply_of(harness.client.hset(keys.metadata(user), items=words))


HOW = ("altered", "by another user", "of another epoch", "of another secret", "an earlier state")


@pytest.mark.parametrize("how", [*HOW, "of another worker"])
async def test_forged_metadata_make_no_used_worker_idle(harness: ActivityHarness, how: str) -> None:
    """What cannot be believed counts as used right now: only the worker itself can say that it is
    idle."""
    user, ref = await victim(harness)
    check = CheckWorker(user_id=user, worker=ref)
    before = await harness.run(harness.checking.check_worker, check)
    assert (before.marked, before.worker_state) == (True, "Active")
    assert USED - 30 < time.time() - before.last_activity < USED + 30
    await forge(harness, user, ref, how)
    after = await harness.run(harness.checking.check_worker, check)
    assert (after.marked, after.worker_state) == (True, "")
    assert time.time() - after.last_activity < 30


@pytest.mark.parametrize("how", HOW)
async def test_maintenance_ends_no_worker_by_forged_metadata(
    harness: ActivityHarness, how: str
) -> None:
    """The first scan may suspect it; the second one, which decides, believes its worker alone."""
    user, ref = await victim(harness)
    await forge(harness, user, ref, how)
    scanner = FleetScanner(
        harness.client, harness.database, harness.launcher, harness.secrets, pool=POOL
    )
    limits = OverdueLimits(connect=600.0, idle=FORGED / 2)
    suspect = Suspect(kind=AnomalyKind.OVERDUE, why="drains for too long", user_id=user)
    assert find_anomalies(await scanner.scan_suspects([suspect], 1), limits) == []


async def test_genuine_metadata_that_are_shown_again_count_as_long_as_they_are_valid(
    harness: ActivityHarness,
) -> None:
    """Those of a minute's rest in place of those of now. No longer than a mark lives: an earlier
    state is not believed."""
    user, ref = await victim(harness)
    rested = await reply_of(harness.client.hgetall(keys.metadata(user)))
    valid_for = int(rested[VALID_UNTIL.encode()]) / 1000 - time.time()
    assert 0 < valid_for <= keys.MARK_TTL_S
    now_ms = int(time.time() * 1000)
    await harness.renew_mark(
        user, ref.worker_id, ref.epoch, state="Processing", last_activity_ms=now_ms
    )
    check = CheckWorker(user_id=user, worker=ref)
    genuine = await harness.run(harness.checking.check_worker, check)
    assert (genuine.worker_state, time.time() - genuine.last_activity < 30) == ("Processing", True)
    await reply_of(harness.client.delete(keys.metadata(user)))
    await reply_of(harness.client.hset(keys.metadata(user), mapping=rested))
    shown_again = await harness.run(harness.checking.check_worker, check)
    assert (shown_again.marked, shown_again.worker_state) == (True, "Active")
    assert time.time() - shown_again.last_activity > USED - 1


async def test_maintenance_ends_a_worker_that_says_itself_that_it_drains(
    harness: ActivityHarness,
) -> None:
    user, ref = await victim(harness)
    await harness.renew_mark(user, ref.worker_id, ref.epoch, state="Draining", last_activity_ms=0)
    scanner = FleetScanner(
        harness.client, harness.database, harness.launcher, harness.secrets, pool=POOL
    )
    suspect = Suspect(kind=AnomalyKind.OVERDUE, why="drains for too long", user_id=user)
    anomalies = find_anomalies(
        await scanner.scan_suspects([suspect], 1), OverdueLimits(connect=600.0, idle=FORGED)
    )
    assert [anomaly.why for anomaly in anomalies] == ["drains for too long"]
