"""Valkey users of workers: a worker that was taken over reaches its own keys, and nothing of
others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    ResponseError,
)
from sqlalchemy import func, update

from infra.database.engine import Database
from infra.database.models import User, WorkerLaunch, WorkerScript, WorkerSession
from infra.database.workers import launches
from infra.database.workers.sessions import AssignedWorker
from infra.local.servers import ValkeyServer
from infra.valkey import client as valkey
from infra.valkey.client import reply_of
from infra.valkey.worker_users import WorkerUsers
from infra.vault.key_pairs import OrchestratorKeys, create_orchestrator_keys
from infra.vault.secret_versions import add_version
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, scripts

POOL = "default"
#: The hostile worker and its user; two others, one of them without a user.
MALLORY, ALICES, FREE = "p-mallory", "p-alices", "p-free"

Attempt = Callable[[Redis], Any]


@pytest.fixture
def orchestrator_keys(tmp_path: Path) -> OrchestratorKeys:
    create_orchestrator_keys(tmp_path / "keys")
    return OrchestratorKeys(tmp_path / "keys")


@pytest.fixture
async def database(migrated_database: str) -> AsyncIterator[Database]:
    database = Database(migrated_database)
    yield database
    await database.close()


@pytest.fixture
async def users(
    valkey_client: Redis, database: Database, orchestrator_keys: OrchestratorKeys
) -> AsyncIterator[WorkerUsers]:
    """Three workers: Mallory's, Alice's, and a free one."""
    users = WorkerUsers(valkey_client, database, orchestrator_keys)
    for worker_id in (MALLORY, ALICES, FREE):
        await users.create(worker_id, POOL)
    await users.admit(MALLORY, POOL, "mallory", ["1-mallory"])
    await users.admit(ALICES, POOL, "alice", ["1-alice"])
    yield users
    for worker_id in (MALLORY, ALICES, FREE):
        await users.delete(worker_id)


@pytest.fixture
async def mallory(users: WorkerUsers, valkey_server: ValkeyServer) -> AsyncIterator[Redis]:
    """What the hostile worker has: its own user."""
    async with valkey.connect_valkey(users.url(MALLORY, valkey_server.url)) as client:
        yield client


def run(script: scripts.Script, names: list[str], *words: str) -> Attempt:
    return lambda client: client.evalsha(script.sha, len(names), *names, *words)


def command(*words: str) -> Attempt:
    return lambda client: client.execute_command(*words)  # type: ignore[no-untyped-call]


#: Reads, forgeries, deletions and floods of what belongs to others, and what only the server's
#: owner may do.
ATTACKS = {
    "reads another user's queue": command("LRANGE", keys.requests("alice"), "0", "-1"),
    "places an order for another user": command("LPUSH", keys.requests("alice"), "forged"),
    "reads another user's answer": command("GET", keys.response("alice", "order-1")),
    "forges another user's answer": command("SET", keys.response("alice", "order-1"), "forged"),
    "renews another user's mark": command("SET", keys.mark("alice"), f"9:{MALLORY}"),
    "deletes another user's mark": command("DEL", keys.mark("alice")),
    "reads another user's metadata": command("HGETALL", keys.metadata("alice")),
    "fences another user's worker": command("HSET", keys.owner("alice"), "epoch", "9"),
    "opens another user's switch": command("HSET", keys.switch("alice"), "*", "open"),
    "controls another user's worker": command("RPUSH", keys.control("alice"), "forged"),
    "reads another user's jobs": command("HGETALL", job_keys.meta(job_keys.user_tag("alice"))),
    "makes itself the owner": command("HSET", keys.owner("mallory"), "epoch", "9"),
    "makes itself the owner by script": run(
        scripts.SET_OWNER,
        [keys.owner("mallory"), keys.switch("mallory")],
        "9",
        MALLORY,
        "g",
        "1",
        "*",
        "open",
    ),
    "opens its own switch": command("HSET", keys.switch("mallory"), "*", "open"),
    "opens its own switch by script": run(
        scripts.WRITE_SWITCH, [keys.switch("mallory")], "99", "*", "open"
    ),
    "reads another worker's entry": command("HGETALL", keys.pool_worker(POOL, FREE)),
    "changes another worker's entry": command(
        "HSET", keys.pool_worker(POOL, FREE), "public_key", "forged"
    ),
    "reads another worker's inbox": command("LRANGE", keys.pool_inbox(POOL, FREE), "0", "-1"),
    "joins the pool again": command("ZADD", keys.pool_ready(POOL), "1", MALLORY),
    "deletes the pool": command("DEL", keys.pool_ready(POOL)),
    "claims a worker": run(
        scripts.CLAIM,
        [keys.pool_ready(POOL), keys.pool_claim(POOL, "claim-1")],
        "claim-1",
        "pool:",
        "60",
    ),
    "says that its claim got another worker": command(
        "SET", keys.pool_claim(POOL, "claim-1"), ALICES
    ),
    "reads another's replies to claims": command(
        "LRANGE", keys.pool_reply(POOL, ALICES, "claim-2"), "0", "-1"
    ),
    "answers another's claim": command("RPUSH", keys.pool_reply(POOL, ALICES, "claim-2"), "forged"),
    "lets another's replies expire": command(
        "EXPIRE", keys.pool_reply(POOL, ALICES, "claim-2"), "0"
    ),
    "takes a worker out of its pool": command("ZREM", keys.pool_ready(POOL), FREE),
    "has itself admitted": run(
        scripts.ADMIT_WORKER,
        [
            keys.pool_worker(POOL, MALLORY),
            keys.pool_ready(POOL),
            keys.pool_claim(POOL, "claim-1"),
            keys.pool_born(POOL, "claim-1"),
        ],
        MALLORY,
        "",
        "60",
    ),
    "deletes events that nobody has read": command(
        "XADD", keys.EVENTS, "MAXLEN", "0", "*", "e", "forged"
    ),
    "chooses an event's time": command("XADD", keys.EVENTS, "253402300800000-0", "e", "forged"),
    "sends events as another worker": command("RPUSH", keys.events_of(ALICES), "forged"),
    "reads another worker's events": command("LRANGE", keys.events_of(ALICES), "0", "-1"),
    "deletes another worker's events": command("DEL", keys.events_of(ALICES)),
    "deletes the rings of all": command("DEL", keys.EVENT_BELL),
    "takes the rings of all": command("LPOP", keys.EVENT_BELL, "100"),
    "has events expire": command("EXPIRE", keys.EVENT_BELL, "1"),
    "pumps": run(
        scripts.PUMP_EVENTS,
        [keys.EVENTS, keys.EVENT_BELL, keys.CHANGES],
        keys.events_of(""),
        "1",
        "1",
        "1",
    ),
    "forges a change of a worker": command("XADD", keys.CHANGES, "*", "e", "forged"),
    "reads the events of all": command("XRANGE", keys.EVENTS, "-", "+"),
    "deletes the events of all": command("DEL", keys.EVENTS),
    "trims the events of all": command("XTRIM", keys.EVENTS, "MAXLEN", "0"),
    "changes the generation": command("SET", keys.GENERATION, "forged"),
    "changes since when the server is known": command("HSET", keys.SERVER_SINCE, "at_ms", "0"),
    "reads the fleet's jobs": command("HGETALL", job_keys.job(job_keys.FLEET_TAG, "mail-1")),
    "makes a job of the fleet": command("ZADD", job_keys.ready(job_keys.FLEET_TAG), "1", "mail"),
    "deletes its own counts": command("DEL", keys.budget("1-mallory", "orders")),
    "reads another user's counts": command("ZCARD", keys.budget("1-alice", "orders")),
    "counts for another user": command("ZADD", keys.budget("1-alice", "orders"), "1", "forged"),
    "lets another user's counts expire": command("PEXPIRE", keys.budget("1-alice", "orders"), "1"),
    "spends another user's budget": run(
        scripts.SPEND_BUDGET,
        [keys.budget("1-alice", "since"), keys.budget("1-alice", "orders")],
        "call",
        "",
        "1",
        "0",
        "1",
        "10000",
        "5",
        "0",
    ),
    "takes another user's connection": run(
        scripts.TAKE_CONNECTION,
        [keys.budget("1-alice", name) for name in ("since", "connections", "holders")],
        "mallory/a1/1",
        "holder",
        "150000",
        "5",
        "10000",
        "",
        "1",
    ),
    "replaces the totals of all users' jobs": command("SET", job_keys.user_totals(), "x"),
    "reads the totals of all users' jobs": command("GET", job_keys.user_totals()),
    "counts for others": command("HINCRBY", job_keys.user_totals(), "late", "1"),
    "reads the fleet's settings of jobs": command("HGETALL", job_keys.meta(job_keys.FLEET_TAG)),
    "listens to answers": command("SUBSCRIBE", keys.answers("api-1")),
    "listens to everything": command("PSUBSCRIBE", "*"),
    "listens to another's jobs": command("SUBSCRIBE", keys.own_answers("alice", "job-1")),
    "publishes elsewhere": command("PUBLISH", "other", "forged"),
    "flushes": command("FLUSHALL"),
    "lists all keys": command("KEYS", "*"),
    "scans all keys": command("SCAN", "0"),
    "watches all commands": command("MONITOR"),
    "brings a script": command("EVAL", "return 1", "0"),
    "loads a script": command("SCRIPT", "LOAD", "return 1"),
    "deletes all scripts": command("SCRIPT", "FLUSH"),
    "loads a function": command("FUNCTION", "LOAD", "#!lua name=x\n"),
    "reads the configuration": command("CONFIG", "GET", "*"),
    "changes the configuration": command("CONFIG", "SET", "dir", "/"),
    "stops the server": command("SHUTDOWN"),
    "ends other clients": command("CLIENT", "KILL", "TYPE", "normal"),
    "lists other clients": command("CLIENT", "LIST"),
    "makes a user": command("ACL", "SETUSER", "x", "on", "nopass", "+@all", "~*"),
    "reads the users": command("ACL", "GETUSER", ALICES),
    "learns of the whole server": command("INFO"),
    "makes it a replica": command("REPLICAOF", "127.0.0.1", "1"),
    "reads another key by SORT": command(
        "SORT", keys.requests("mallory"), "BY", "nosort", "GET", "*"
    ),
    "moves another's key to itself": command(
        "RENAME", keys.requests("alice"), keys.requests("mallory")
    ),
    "copies another's key": command("COPY", keys.requests("alice"), keys.requests("mallory")),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
async def test_a_hostile_worker_is_refused(
    attack: str, mallory: Redis, valkey_client: Redis
) -> None:
    await valkey_client.lpush(keys.requests("alice"), "an order")
    await valkey_client.zadd(keys.pool_ready(POOL), {FREE: 1})
    await valkey_client.rpush(keys.events_of(ALICES), "an event")
    await valkey_client.rpush(keys.EVENT_BELL, ALICES)
    before = await _everything(valkey_client)
    # A refusal inside a script is an error of the script.
    with pytest.raises((NoPermissionError, ResponseError), match=r"permission|ACL failure"):
        await ATTACKS[attack](mallory)
    assert await _everything(valkey_client) == before


@pytest.mark.parametrize("to", [("PUBLISH", keys.answers("api")), ("RPUSH", keys.EVENT_BELL)])
async def test_nobody_hears_strings_of_megabytes_from_a_worker(
    mallory: Redis, valkey_client: Redis, to: tuple[str, str]
) -> None:
    """They would be read by who waits for answers or for the bell: the server takes none."""
    await command(*to, "x" * 1_000_000)(mallory)
    with pytest.raises((ConnectionError, ResponseError)):
        await command(*to, "x" * 2_000_000)(mallory)
    assert await valkey_client.llen(keys.EVENT_BELL) == (to[0] == "RPUSH")


async def _everything(client: Redis) -> dict[Any, Any]:
    return {name: await client.dump(name) for name in sorted(await client.keys("*"))}


async def test_a_worker_that_ends_takes_its_mark_with_it(
    mallory: Redis, valkey_client: Redis
) -> None:
    """Left behind, it would say for 30 s that the user has a worker."""
    await valkey_client.set(keys.mark("mallory"), f"1:{MALLORY}")
    await valkey_client.hset(keys.metadata("mallory"), "state", "Active")
    names = [keys.mark("mallory"), keys.metadata("mallory")]
    assert await run(scripts.REMOVE_MARK, names, f"1:{MALLORY}")(mallory) == 1
    assert not await valkey_client.exists(*names)


async def test_a_free_worker_reaches_no_users_keys(
    users: WorkerUsers, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    async with valkey.connect_valkey(users.url(FREE, valkey_server.url)) as client:
        for user_id in ("alice", "mallory", "new"):
            with pytest.raises(NoPermissionError):
                await client.lrange(keys.requests(user_id), 0, -1)
            with pytest.raises(NoPermissionError):
                await client.get(keys.mark(user_id))
        await users.admit(FREE, POOL, "new")
        assert await client.lrange(keys.requests("new"), 0, -1) == []


#: What a worker without a user would try.
POOL_ATTACKS = (
    command("ZREM", keys.pool_ready(POOL), ALICES),
    command("ZADD", keys.pool_ready(POOL), "1", FREE),
    command("SET", keys.pool_claim(POOL, "claim-2"), FREE),
    command("RPUSH", keys.pool_born(POOL, "claim-2"), FREE),
    command("DEL", keys.pool_worker(POOL, MALLORY)),
)


async def test_a_free_worker_only_announces_itself(
    users: WorkerUsers, valkey_server: ValkeyServer, valkey_client: Redis
) -> None:
    await valkey_client.zadd(keys.pool_ready(POOL), {ALICES: 1})
    before = await _everything(valkey_client)
    async with valkey.connect_valkey(users.url(FREE, valkey_server.url)) as client:
        for attack in POOL_ATTACKS:
            with pytest.raises(NoPermissionError):
                await attack(client)
        assert await _everything(valkey_client) == before
        entry = [keys.pool_worker(POOL, FREE)]
        announced = await valkey.run_script(
            client, scripts.ANNOUNCE_WORKER, entry, [1000, "public_key", "k"]
        )
        assert announced == b""
        await reply_of(client.rpush(keys.EVENT_BELL, f"{POOL} {FREE}"))
        await reply_of(client.rpush(keys.events_of(FREE), "an event"))


async def test_a_repeated_launch_takes_nothing_from_a_claimed_worker(
    users: WorkerUsers, mallory: Redis
) -> None:
    await users.create(MALLORY, POOL)
    await users.restore([(MALLORY, POOL)], [])  # by one who read the assignments before the claim
    assert await mallory.get(keys.mark("mallory")) is None
    with pytest.raises(NoPermissionError):  # nor does it let the worker be claimed for another user
        await mallory.zadd(keys.pool_ready(POOL), {MALLORY: 1})


async def test_the_end_of_a_worker_ends_its_connections(users: WorkerUsers, mallory: Redis) -> None:
    assert await mallory.ping()
    await users.delete(MALLORY)
    with pytest.raises((AuthenticationError, ConnectionError)):
        await mallory.ping()


async def test_another_workers_password_is_refused(
    users: WorkerUsers, valkey_server: ValkeyServer
) -> None:
    forged = users.url(MALLORY, valkey_server.url).replace(MALLORY, ALICES)
    async with valkey.connect_valkey(forged) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()


async def test_a_worker_keeps_its_password_when_the_launch_secret_is_rotated(
    users: WorkerUsers, valkey_server: ValkeyServer, tmp_path: Path
) -> None:
    before = users.url(FREE, valkey_server.url)
    add_version(tmp_path / "keys" / "launch.key", keep=2)
    assert users.url(FREE, valkey_server.url) != before
    await users.admit(FREE, POOL, "frees")
    async with valkey.connect_valkey(before) as client:
        assert await client.ping()


async def test_a_host_with_other_launch_secrets_takes_no_password(
    users: WorkerUsers,
    valkey_server: ValkeyServer,
    valkey_client: Redis,
    database: Database,
    tmp_path: Path,
) -> None:
    create_orchestrator_keys(tmp_path / "other")
    other = WorkerUsers(valkey_client, database, OrchestratorKeys(tmp_path / "other"))
    await other.admit(FREE, POOL, "frees")
    await other.restore([], [AssignedWorker(MALLORY, POOL, "eve", [])])
    for worker_id, user_id in ((FREE, "frees"), (MALLORY, "eve")):
        async with valkey.connect_valkey(users.url(worker_id, valkey_server.url)) as client:
            assert await client.get(keys.mark(user_id)) is None
            # Rights are replaced, those of a free worker too.
            with pytest.raises(NoPermissionError):
                await client.get(keys.mark("mallory"))
            with pytest.raises(NoPermissionError):
                await client.zadd(keys.pool_ready(POOL), {worker_id: 1})
            with pytest.raises(NoPermissionError):
                await command("SUBSCRIBE", keys.own_answers("mallory", "job-1"))(client)


async def test_a_restarted_server_gets_scripts_and_users_again(
    short_directory: Path, database: Database, orchestrator_keys: OrchestratorKeys
) -> None:
    with ValkeyServer(short_directory, password="secret") as server:
        async with valkey.connect_valkey(server.url) as client:
            users = WorkerUsers(client, database, orchestrator_keys)
            await users.create(FREE, POOL)
            await users.admit(MALLORY, POOL, "mallory")
        server.restart()
        async with (
            valkey.connect_valkey(server.url) as client,
            valkey.connect_valkey(users.url(MALLORY, server.url)) as mallory,
            valkey.connect_valkey(users.url(FREE, server.url)) as free,
        ):
            with pytest.raises(AuthenticationError):
                await mallory.ping()
            users = WorkerUsers(client, database, orchestrator_keys)
            await users.restore(
                [(FREE, POOL), (MALLORY, POOL)], [AssignedWorker(MALLORY, POOL, "mallory", [])]
            )
            names = [keys.owner("mallory"), keys.mark("mallory"), keys.metadata("mallory")]
            assert (
                await run(scripts.RENEW_MARK, names, "1", MALLORY, "30000")(mallory) == b"no_owner"
            )
            assert await free.hgetall(keys.pool_worker(POOL, FREE)) == {}
            with pytest.raises(NoPermissionError):
                await free.get(keys.mark("mallory"))


async def test_who_was_fenced_or_cut_off_gets_no_login_on_a_new_server_though_it_still_runs(
    users: WorkerUsers, valkey_client: Redis, database: Database
) -> None:
    ended, cut_off, claimed, fresh = "p-ended", "p-cut-off", "p-cut-off-with-user", "p-fresh"
    async with database.session() as session:
        session.add(User(id="former"))
        await session.flush()
        session.add(
            WorkerSession(
                user_id="former",
                epoch=1,
                claim_id="c1",
                pool=POOL,
                worker_id=ended,
                ended_at=func.clock_timestamp(),
                end_reason="fenced",
            )
        )
    for worker_id in (cut_off, claimed):
        await valkey_client.set(keys.cut_off(worker_id), "wrote too much")
    await users.restore(
        [(worker_id, POOL) for worker_id in (ended, cut_off, claimed, fresh)],
        [AssignedWorker(claimed, POOL, "mallory", [])],
    )
    there = {valkey.text_of(name) for name in await valkey_client.acl_users()}
    assert there & {ended, cut_off, claimed, fresh} == {fresh}
    await users.delete(fresh)


async def test_users_of_workers_that_are_not_there_are_deleted(
    users: WorkerUsers, valkey_client: Redis, database: Database
) -> None:
    """As a failed launch leaves them."""
    failed, fresh, listed, free, claimed = "c-failed", "c-fresh", "p-listed", "p-entry", "p-claimed"
    for worker_id in (failed, fresh, listed, free, claimed):
        await database.fetch(launches.record_launch, worker_id=worker_id, pool=POOL, version="1")
        await users.create(worker_id, POOL)
    async with database.session() as session:
        old = update(WorkerLaunch).values(launched_at=func.clock_timestamp() - timedelta(hours=2))
        await session.execute(old.where(WorkerLaunch.worker_id != fresh))
        session.add(User(id="someone"))
        await session.flush()
        session.add(
            WorkerSession(user_id="someone", epoch=1, claim_id="c1", pool=POOL, worker_id=claimed)
        )
    await reply_of(valkey_client.hset(keys.pool_worker(POOL, free), "state", "ready"))
    await users.delete_unused([listed])
    there = {valkey.text_of(name) for name in await valkey_client.acl_users()}
    assert failed not in there
    assert {fresh, listed, free, claimed, MALLORY, ALICES, FREE, "default"} <= there
    await valkey_client.execute_command("ACL", "DELUSER", fresh, listed, free, claimed)  # type: ignore[no-untyped-call]


async def test_a_launch_that_waits_gets_a_user_again_that_was_deleted(
    users: WorkerUsers, valkey_server: ValkeyServer
) -> None:
    await users.delete(FREE)
    await users.create(FREE, POOL, again=True)
    await users.create(MALLORY, POOL, again=True)
    async with valkey.connect_valkey(users.url(FREE, valkey_server.url)) as client:
        assert await client.ping()


def sha_of(source: str) -> str:
    return sha1(source.encode(), usedforsecurity=False).hexdigest()


async def test_workers_of_another_release_find_their_scripts_on_a_new_server(
    users: WorkerUsers, mallory: Redis, valkey_client: Redis, database: Database
) -> None:
    """An orchestrator loads what others knew, up to 90 days later."""
    kept, old, now = "return 'of the release before'", "return 'older'", datetime.now(UTC)
    async with database.session() as session:
        session.add_all(
            WorkerScript(sha=sha_of(source), source=source, seen_at=now - timedelta(days))
            for source, days in ((kept, 89), (old, 91))
        )
    await valkey_client.script_flush()
    await users.restore([], [])
    mark = keys.mark("mallory")
    assert await mallory.evalsha(sha_of(kept), 1, mark) == b"of the release before"
    with pytest.raises(NoScriptError):
        await mallory.evalsha(sha_of(old), 1, mark)
