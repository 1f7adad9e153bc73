"""The kill switch: set in PostgreSQL, told to every worker it concerns before the caller hears of it."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from api import log
from infra import switching, valkey
from infra.database import accounts, switches, users
from infra.database.engine import Database
from infra.database.switches import Scope
from infra.database.trading_models import Switch
from worker_runtime.protocol.errors import UnknownAccount
from worker_runtime.protocol.switches import SwitchState, UserSwitch


class Switchboard:
    def __init__(self, database: Database, client: Redis) -> None:
        self._database = database
        self._client = client
        self._log = log.logger()

    async def put(self, scope: Scope, state: SwitchState, *, actor: str, reason: str) -> tuple[Switch, bool]:
        """Sets a switch; the flag says whether all workers concerned have it.

        Once it is committed it holds: for orders that come, at once; for workers that Valkey could not tell
        of it, by the watcher's next look. Raises `UserNotFound`, `UnknownAccount`, `DatabaseUnavailable`.
        """
        async with self._database.session() as session:
            if scope.user_id:
                await users.get(session, scope.user_id)
            if scope.account_id and not await accounts.exists(session, scope.user_id, scope.account_id):
                raise UnknownAccount(f"user {scope.user_id} has no account {scope.account_id}")
            row = await switches.put(session, scope, state, actor=actor, reason=reason)
        told = await self._tell(scope)
        self._log.warning(
            "switched", scope=scope.name, state=state.value, actor=actor, version=row.version, told=told
        )
        return row, told

    async def _tell(self, scope: Scope) -> bool:
        try:
            server = await valkey.server_id(self._client)  # first (`switching`)
            async with self._database.session() as session:
                picture = await switches.all_of(session)
                # After the picture: a claim that commits in between reads the switches for itself.
                concerned = await switches.in_reach(session, scope)
            told = {user_id: picture.of(user_id) for user_id in concerned}
            await switching.tell(self._client, server, told)
        except (RedisError, OSError) as error:
            self._log.warning("switch_not_told", scope=scope.name, error=type(error).__name__)
            return False
        return True

    async def rows(self, user_id: str | None) -> tuple[Sequence[Switch], UserSwitch | None]:
        """All switches, or those that can hold for one user and what counts for him.

        Raises `UserNotFound`.
        """
        async with self._database.session() as session:
            if user_id is None:
                return await switches.rows(session), None
            await users.get(session, user_id)
            return await switches.rows(session, user_id), await switches.of_user(session, user_id)
