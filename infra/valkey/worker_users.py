"""Makes a Valkey user for each worker, which reaches its own keys only (setting `valkey_users`).

Its name is the worker's id, its password is derived from the worker's launch token. Before a claim
it reaches its entry and inbox in the pool; from the claim on also the keys of its user.

Valkey allows a command if the user's own rights or one selector (in parentheses) allow it with all
of its keys. It checks a command inside a script like any other. So one selector allows only
`evalsha`, with every key that the scripts name. The other rights decide what a script may do to
each key: it may only read the owner and the switch, for example.

Valkey neither stores nor replicates users: on a new server they are made again (`restore`).
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import date
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis

from infra.database.engine import Database
from infra.database.workers import launches
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import AssignedWorker
from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.vault.key_pairs import OrchestratorKeys
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts
from worker_runtime.protocol import keys, scripts

#: On its own keys. No command that names no key but shows or changes those of others (KEYS, SCAN,
#: SORT, FLUSHALL, SCRIPT, EVAL, CONFIG, CLIENT, ACL, MONITOR, SUBSCRIBE, WAIT…).
COMMANDS = (
    "ping",
    "time",
    "select",
    "info|server",
    "publish",
    "get",
    "getrange",
    "set",
    "del",
    "exists",
    "expire",
    "pexpire",
    "persist",
    "hget",
    "hset",
    "hsetnx",
    "hmget",
    "hgetall",
    "hdel",
    "hincrby",
    "hexists",
    "hvals",
    "hlen",
    "hkeys",
    "lpush",
    "rpush",
    "rpop",
    "lmove",
    "lrem",
    "llen",
    "lpos",
    "lrange",
    "blpop",
    "sadd",
    "srem",
    "smembers",
    "xadd",
    "zadd",
    "zrem",
    "zrange",
    "zrangebyscore",
    "zcard",
    "zscore",
    "zrank",
    "zpopmin",
    "zincrby",
    "zremrangebyscore",
)
#: The commands by which the scripts of the limits touch the counts of a user's calls.
_BUDGET_COMMANDS = (
    "hget",
    "hset",
    "hmget",
    "hdel",
    "pexpire",
    "zadd",
    "zrem",
    "zrange",
    "zrangebyscore",
    "zcard",
    "zscore",
    "zremrangebyscore",
)
#: In the rights of a claimed worker only.
_CLAIMED = "+subscribe"
#: Users made in one round trip.
_USERS_PER_PIPELINE = 500

log = structlog.get_logger()


class WorkerUsers:
    """May be used by every orchestrator at once: all make the same users."""

    def __init__(
        self, client: Redis, database: Database, orchestrator_keys: OrchestratorKeys
    ) -> None:
        self._client = client
        self._database = database
        self._keys = orchestrator_keys
        #: The last server on which `create` loaded the scripts, and the day.
        self._scripts_on: tuple[str, date] | None = None

    def url(self, worker_id: str, url: str) -> str:
        """Returns `url` with the worker's own name and password."""
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"{worker_id}:{self.password(worker_id)}@{place}").geturl()

    def password(self, worker_id: str) -> str:
        """Returns the password of a new worker."""
        return self._passwords(worker_id)[0]

    def _passwords(self, worker_id: str) -> list[str]:
        """Returns one password for each launch secret that is held: the worker may be older than
        the present one."""
        return [
            blake2b(
                worker_id.encode(), key=token, person=b"valkey user", digest_size=32
            ).hexdigest()
            for token in self._keys.launch_tokens(worker_id)
        ]

    async def create(self, worker_id: str, pool: str, *, again: bool = False) -> None:
        """Creates the worker's login before a launch, and `again` while it waits, if it is gone.

        A claimed worker gets no more rights.
        """
        rights = await self._ask("ACL", "GETUSER", worker_id)
        if again and rights is not None:
            return
        server = await valkey.read_server_id(self._client)
        if self._scripts_on != (server, date.today()):  # the day: for `SCRIPTS_KEPT`
            await self.load_scripts()
            self._scripts_on = server, date.today()
        if _CLAIMED not in str(rights):
            await self._ask(*self._addition(worker_id, free_rights(worker_id, pool)))

    async def admit(
        self, worker_id: str, pool: str, user_id: str, budgets: Collection[str] | None = None
    ) -> None:
        """Opens the keys of this user, and the budgets of these names. Called before a claim or
        reload is sent; safe to repeat. `budgets`: None: all of them, for a worker that 0.1.0
        claimed."""
        rights = claimed_rights(worker_id, pool, user_id, budgets)
        await self._ask(*self._definition(worker_id, rights))

    async def workers_with_budgets(self, names: Collection[str]) -> dict[str, list[str]]:
        """Returns for each budget the workers whose calls are counted in it, by their rights."""
        workers: dict[str, list[str]] = {name: [] for name in names}
        rights = {f"~{keys.budget(name, '*')}": name for name in names}
        for line in await self._ask("ACL", "LIST"):
            _, user, *words = text_of(line).split()
            held = {rights[right] for word in words if (right := word.strip("()")) in rights}
            for name in held:
                workers[name].append(user)
        return workers

    async def delete(self, worker_id: str) -> None:
        """Deletes the login of a worker that has ended; cuts connections that it left."""
        await self._ask("ACL", "DELUSER", worker_id)

    async def delete_unused(self, running: Collection[str]) -> None:
        """Deletes the Valkey users of workers that do not run: after failed launches, and after
        ends that nobody reported.

        `running`: the workers that the launcher lists. A worker with an entry in its pool, or with
        a user, counts as running, too.
        """
        unlisted = {text_of(name) for name in await self._client.acl_users()}.difference(running)
        unused = await self._database.fetch(launches.long_unassigned, unlisted)
        async with self._client.pipeline(transaction=False) as pipe:
            for worker_id, pool in unused:
                pipe.exists(keys.pool_worker(pool, worker_id))
            entries = await pipe.execute()
        gone = [
            worker_id for (worker_id, _), entry in zip(unused, entries, strict=True) if not entry
        ]
        if gone:
            await self._ask("ACL", "DELUSER", *gone)
            log.info("worker_users_deleted", count=len(gone))

    async def _ask(self, *words: str) -> Any:
        return await reply_of(self._client.execute_command(*words))  # type: ignore[no-untyped-call]

    async def load_scripts(self) -> None:
        await load_worker_scripts(self._client, self._database)

    async def restore(
        self, free: Iterable[tuple[str, str]], claimed: Iterable[AssignedWorker]
    ) -> None:
        """Makes scripts and users again, on a server that may have lost them. Safe to repeat.

        `free`: worker and pool of all running workers; `claimed`: those with a user. A worker whose
        assignment has ended, or that was cut off, may still run for a while: it gets no login
        again.
        """
        await self.load_scripts()
        free, claimed = list(free), list(claimed)
        ids = [worker_id for worker_id, _ in free]
        barred = await self._database.fetch(worker_sessions.workers_that_ended, ids)
        barred |= await self._cut_off([*ids, *(worker.worker_id for worker in claimed)])
        commands = {
            worker.worker_id: self._definition(worker.worker_id, claimed_rights(*worker))
            for worker in claimed
            if worker.worker_id not in barred
        }
        there = {text_of(name) for name in await self._client.acl_users()}
        for worker_id, pool in free:
            if worker_id not in there and worker_id not in commands and worker_id not in barred:
                # Added, so that nothing is taken from a worker that is claimed just now.
                commands[worker_id] = self._addition(worker_id, free_rights(worker_id, pool))
        waiting = list(commands.values())
        for start in range(0, len(waiting), _USERS_PER_PIPELINE):
            async with self._client.pipeline(transaction=False) as pipe:
                for command in waiting[start : start + _USERS_PER_PIPELINE]:
                    pipe.execute_command(*command)
                await pipe.execute()
        # Read after the logins are made: whoever is cut off is fenced first, and then loses the
        # login once more.
        for worker_id in await self._database.fetch(worker_sessions.workers_that_ended, commands):
            await self.delete(worker_id)
        log.info("worker_users_restored", count=len(waiting))

    async def _cut_off(self, worker_ids: Sequence[str]) -> set[str]:
        """Returns those of the workers that were cut off because they used too much."""
        reasons: list[bytes | None] = []
        for start in range(0, len(worker_ids), _USERS_PER_PIPELINE):
            key_names = [
                keys.cut_off(worker_id)
                for worker_id in worker_ids[start : start + _USERS_PER_PIPELINE]
            ]
            reasons += await valkey.read_strings(self._client, key_names)
        return {
            worker_id
            for worker_id, reason in zip(worker_ids, reasons, strict=True)
            if reason is not None
        }

    def _addition(self, worker_id: str, rights: Sequence[str]) -> list[str]:
        passwords = [f">{password}" for password in self._passwords(worker_id)]
        return ["ACL", "SETUSER", worker_id, "on", *passwords, "-@all", *rights]

    def _definition(self, worker_id: str, rights: Sequence[str]) -> list[str]:
        """Replaces the rights.

        Passwords stay: another host may hold launch secrets that this one lacks.
        """
        addition = self._addition(worker_id, rights)
        return [*addition[:3], "resetkeys", "resetchannels", "clearselectors", *addition[3:]]


async def load_worker_scripts(client: Redis, database: Database) -> None:
    """Loads the scripts that workers may run but not bring. Some workers are of the release before
    or after ours, so the scripts that other releases have stored are loaded, too."""
    async with database.session() as session:
        sources = await launches.keep_scripts(session, (*scripts.ALL, *job_scripts.ALL))
    async with client.pipeline(transaction=False) as pipe:
        for source in sources:
            pipe.script_load(source)
        await pipe.execute()


def free_rights(worker_id: str, pool: str) -> list[str]:
    """Returns the rights of a worker without a user."""
    own = [keys.pool_worker(pool, worker_id), keys.pool_inbox(pool, worker_id)]
    return [*_rights(worker_id, own), _selector(["evalsha"], own)]


def claimed_rights(
    worker_id: str, pool: str, user_id: str, budgets: Collection[str] | None = None
) -> list[str]:
    """Returns the rights of a user's worker. `budgets` is as for `WorkerUsers.admit`."""
    own = [
        keys.pool_worker(pool, worker_id),
        keys.pool_inbox(pool, worker_id),
        keys.pool_reply(pool, worker_id, "*"),
        keys.requests(user_id),
        keys.processing(user_id),
        keys.doorbell(user_id),
        keys.seen(user_id, "*"),
        keys.response(user_id, "*"),
        keys.mark(user_id),
        keys.metadata(user_id),
        keys.pop(user_id),
        keys.journal(user_id, "*"),
        keys.control(user_id),
        job_keys.every_key(job_keys.user_tag(user_id)),
    ]
    read = [keys.owner(user_id), keys.switch(user_id)]
    counts = [keys.budget(name, "*") for name in (["*"] if budgets is None else budgets)]
    return [
        *_rights(worker_id, own, read),
        f"&{job_keys.done(job_keys.user_tag(user_id), '*')}",
        _selector(["evalsha"], [*own, *read, *counts]),
        *([_selector(_BUDGET_COMMANDS, counts)] if counts else []),
        # A job waits for the answer of the user's session.
        f"({_CLAIMED} &{keys.own_answers(user_id, '*')})",
    ]


def _rights(worker_id: str, own: Iterable[str], read: Iterable[str] = ()) -> list[str]:
    """Returns the rights of any worker: its own keys, what all may read, and events."""
    return [
        *(f"+{command}" for command in COMMANDS),
        *(f"~{key}" for key in own),
        *(f"%R~{key}" for key in (*read, keys.GENERATION, keys.SERVER_SINCE)),
        f"&{keys.answers('*')}",
        _selector(["rpush"], [keys.events_of(worker_id), keys.EVENT_BELL]),
    ]


def _selector(commands: Iterable[str], names: Iterable[str]) -> str:
    words = [*(f"+{command}" for command in commands), *(f"~{name}" for name in names)]
    return f"({' '.join(words)})"
