"""Restores in Valkey what only the servers can write: logins, scripts, switches and owner keys.

`MarkWatcher` (`mark_watcher.py`) calls it at each check, because a server may be new, emptied or
restarted at any time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import structlog
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.pool import entries
from infra.database.engine import Database
from infra.database.trading import switches
from infra.database.workers import sessions as worker_sessions
from infra.database.workers.sessions import WorkerInService
from infra.launchers.port import Launcher
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.job_users import JobUsers
from infra.valkey.switch_fanout import SwitchSigner
from infra.valkey.worker_users import WorkerUsers, load_worker_scripts
from infra.vault.message_secret import MessageSecrets
from infra.worker_task import LauncherUnreachable
from worker_runtime.protocol import keys
from workflows.user_worker.messages import WorkerRef

log = structlog.get_logger()


@dataclass(eq=False, repr=False)
class ValkeyRestorer:
    """Writes what a Valkey server lacks, so that workers can log in, renew their marks and take
    orders. All calls may raise `RedisError`, `OSError` and what the connection raises."""

    client: Redis
    message_secrets: MessageSecrets
    #: The workers' logins at Valkey; needs `launcher`. None: workers log in to Valkey as we do.
    users: WorkerUsers | None = None
    launcher: Launcher | None = None
    #: Says which scripts to load for workers that share a login, which may load none themselves.
    #: None: no worker needs them.
    database: Database | None = None
    #: The logins of the fleets of job runners; None: they log in to Valkey as we do.
    job_users: JobUsers | None = None

    def __post_init__(self) -> None:
        #: The last server on which this process made the workers' users.
        self._users_on = ""
        #: The last server on which this process loaded scripts without users, and the day
        #: (`SCRIPTS_KEPT`).
        self._scripts_on: tuple[str, date] | None = None
        self._switches = SwitchSigner(self.message_secrets)
        #: The last server that `restore_new_server` restored.
        self._restored_on = ""

    async def restore_new_server(self, connection: AsyncConnection) -> None:
        """Restores logins and switches on a server that this method has not restored before."""
        server = await valkey.read_server_id(self.client)
        if server == self._restored_on:
            return
        await valkey.note_server(self.client, server)
        await self.restore_logins(server, connection)
        workers = await worker_sessions.workers_in_service(connection)
        await self.restore_switches(workers, server, connection)
        self._restored_on = server

    async def restore_logins(self, server: str, connection: AsyncConnection) -> None:
        """Lets workers and job runners log in to a server that is new: it has neither users nor
        scripts."""
        if self.job_users is not None:
            await self.job_users.ensure(server)
        if self.users is None:
            await self._load_scripts(server)
        elif self.launcher is not None and server != self._users_on:
            await self._restore_users(self.users, self.launcher, server, connection)

    async def _load_scripts(self, server: str) -> None:
        loaded_on = server, date.today()
        if self.database is not None and self._scripts_on != loaded_on:
            await load_worker_scripts(self.client, self.database)
            self._scripts_on = loaded_on

    async def _restore_users(
        self, users: WorkerUsers, launcher: Launcher, server: str, connection: AsyncConnection
    ) -> None:
        """Makes the users of assigned workers, and those of free ones if the launcher can list
        them; otherwise the next check tries again."""
        assigned = await worker_sessions.assigned_now(connection)
        try:
            running = await launcher.list()
        except LauncherUnreachable as error:
            log.warning("free_workers_not_restored", reason=error.detail)
            await users.restore((), assigned)
            return
        await users.restore(((task.worker_id, task.pool) for task in running), assigned)
        self._users_on = server

    async def restore_switches(
        self, workers: Sequence[WorkerInService], server: str, connection: AsyncConnection
    ) -> None:
        """Writes the switches that Valkey lost or never got, that were forged, or copied from
        another server."""
        user_ids = [worker.user_id for worker in workers]
        stored = await switches.read_switches(connection)
        behind = await switch_fanout.users_behind(
            self.client, self._switches, server, stored, user_ids
        )
        if not behind:
            return
        # Read again: a switch that was set since, and lost by Valkey, would come back open.
        stored = await switches.read_switches(connection)
        by_user = {user_id: stored.for_user(user_id) for user_id in behind}
        try:
            await switch_fanout.write_switches(self.client, self._switches, server, by_user, behind)
        except ResponseError as error:
            # Only these users' orders wait; the marks are read all the same.
            log.error("switches_refused", of=len(behind), reason=str(error)[:200])
        else:
            log.warning("switches_restored", count=len(behind))

    async def restore_owners(
        self,
        unmarked: Sequence[WorkerInService],
        generation: str,
        server: str,
        connection: AsyncConnection,
    ) -> set[WorkerInService]:
        """Writes the owner keys that are missing; without one a worker cannot renew its mark.
        Returns the workers that got one."""
        async with self.client.pipeline(transaction=False) as pipe:
            for worker in unmarked:
                pipe.exists(keys.owner(worker.user_id))
            has_owner = await pipe.execute()
        unowned = {worker for worker, has in zip(unmarked, has_owner, strict=True) if not has}
        if not unowned:
            return unowned
        # Read after the owner keys, for the same reason as in `restore_switches`.
        stored = await switches.read_switches(connection)
        for worker in unowned:
            owner = WorkerRef(
                worker_id=worker.worker_id,
                task_id="",
                epoch=worker.epoch,
                claim_id=worker.claim_id,
                pool="",
            )
            words = self._switches.words(worker.user_id, stored.for_user(worker.user_id), server)
            await entries.write_owner(self.client, worker.user_id, owner, generation, words)
        log.warning("owner_keys_restored", count=len(unowned))
        return unowned
