"""Sets kill switches in PostgreSQL,
and writes them for each worker before it answers the caller."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.database import accounts, users
from infra.database.engine import Database
from infra.database.trading import switches
from infra.database.trading.models import Switch
from infra.valkey import client as valkey
from infra.valkey import switch_fanout
from infra.valkey.switch_fanout import SwitchSigner
from worker_runtime.protocol.requests import SwitchState, UserSwitch

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class SwitchControl:
    database: Database
    client: Redis
    signer: SwitchSigner

    async def set_switch(
        self, scope: switches.TradingScope, state: SwitchState, *, actor: str, reason: str
    ) -> tuple[Switch, bool, str | None]:
        """Sets a switch; the flag says whether all workers
        concerned have it, the text what else holds there.

        From the commit on it holds for new orders. Workers that Valkey could not tell get it in the
        watcher's next round. Raises `UserNotFound`, `AccountNotFound`, `DatabaseUnavailable`.
        """
        async with self.database.session() as session:
            if scope.user_id:
                await users.get_user(session, scope.user_id)
            if scope.account_id:
                await accounts.require_account(session, scope.user_id, scope.account_id)
            row = await switches.put_switch(session, scope, state, actor=actor, reason=reason)
            whom = (scope.user_id, scope.account_id)
            other = (
                await switches.holding_switch(session, *whom, but=scope.name)
                if scope.user_id
                else None
            )
        in_force = await self._fan_out(scope)
        log.warning(
            "switched",
            scope=scope.name,
            state=state.value,
            actor=actor,
            version=row.version,
            in_force=in_force,
        )
        return row, in_force, switches.described(other) if other else None

    async def _fan_out(self, scope: switches.TradingScope) -> bool:
        try:
            server = await valkey.read_server_id(self.client)  # first (`switch_fanout`)
            async with self.database.session() as session:
                picture = await switches.read_switches(session)
                # After the picture: a claim that commits in between reads the switches for itself.
                concerned = await switches.users_in_scope(session, scope)
            return await self.write(picture, server, concerned)
        except (RedisError, OSError) as error:
            log.warning("switch_not_fanned_out", scope=scope.name, error=type(error).__name__)
            return False

    async def write(
        self, picture: switches.SwitchSnapshot, server: str, concerned: Sequence[str]
    ) -> bool:
        """Writes the users' switches; whether Valkey has them, or a later one, then. Raises
        `RedisError`."""
        by_user = {user_id: picture.for_user(user_id) for user_id in concerned}
        newer = await switch_fanout.write_switches(self.client, self.signer, server, by_user)
        if not newer:
            return True
        # Somebody's later change has these in it, if it is PostgreSQL's newest and not forged.
        async with self.database.session() as session:
            picture = await switches.read_switches(session)
        return not await switch_fanout.users_behind(
            self.client, self.signer, server, picture, newer
        )

    async def list_switches(
        self, user_id: str | None, **filters: Any
    ) -> tuple[Sequence[Switch], UserSwitch | None]:
        """Lists all switches, or those that can hold for one user and what applies to them.
        `filters` selects, as `switches.list_switches` takes it. Raises `UserNotFound`."""
        async with self.database.session() as session:
            effective = None
            if user_id is not None:
                await users.get_user(session, user_id)
                effective = await switches.switch_of_user(session, user_id)
            return await switches.list_switches(session, user_id, **filters), effective
