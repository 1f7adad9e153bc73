"""The messages between a claim or reload and its worker: sealed accounts, signed messages, and
replies.

The list of replies is never popped, because the repeat of a lost activity must find the reply
again. Waiting is a BLMOVE of the list onto itself, which blocks while it is empty and changes
nothing when it is not.
"""

import asyncio
import time
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from redis.asyncio import Redis

from activities.claims.budgets import (
    AssignmentBudgets,
    BudgetPlanner,
    share_permille,
    shares_by_kind,
)
from infra.database.engine import Database
from infra.database.models import StoredCredentials
from infra.database.workers import sessions as worker_sessions
from infra.process_metrics import REFUSED
from infra.valkey import client as valkey
from infra.valkey.worker_users import WorkerUsers
from infra.vault import vault
from infra.vault.key_pairs import KeyUnwrapper, OrchestratorKeys
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol import keys, scripts, sealing
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import InvalidSignature, MalformedMessage
from worker_runtime.protocol.messages import ClaimReply, Message, SealedAccount
from worker_runtime.protocol.requests import ControlMessage
from workflows.user_worker.messages import WorkerRef

#: Seconds of one blocking wait: below Valkey's socket timeout (5 s), with a heartbeat in between.
MAX_BLOCKING_WAIT_S = 1.0
#: Replies read at once: a list that somebody else filled costs no more.
REPLIES_PER_READ = 100

log = structlog.get_logger()


async def admit_worker(
    users: WorkerUsers | None,
    database: Database,
    worker: WorkerRef,
    user_id: str,
    budgets: Collection[str] | None,
) -> bool:
    """Opens the keys of its user to a worker. Returns False if the worker was cut off meanwhile;
    then it has no login.

    The fence is read after the login is made: a cut-off fences first, and then deletes the login
    once more. `users`: None where workers have no Valkey users. `budgets`: as for
    `WorkerUsers.admit`.
    """
    if users:
        await users.admit(worker.worker_id, worker.pool, user_id, budgets)
    if not await database.fetch(worker_sessions.is_fenced, worker.claim_id):
        return True
    if users:
        await users.delete(worker.worker_id)
    return False


@dataclass(frozen=True, eq=False, repr=False)
class AssignmentSealer:
    """Seals what a worker needs for its user to that worker's key."""

    unwrapper: KeyUnwrapper
    keys: OrchestratorKeys
    secrets: MessageSecrets
    budgets: BudgetPlanner
    _: KW_ONLY
    #: Has the meaning that it has in `SealedAccount`.
    books_first: bool = False

    async def seal(
        self,
        user_id: str,
        stored: Iterable[StoredCredentials],
        key: bytes,
        worker: WorkerRef,
        claim_id: str,
        plan: AssignmentBudgets,
    ) -> tuple[list[SealedAccount], bytes]:
        """Returns the accounts and the keys of the user's messages. Decrypts and seals each account
        at once, so that the clear text exists only in this call (sealed). Adds the budgets of the
        accounts to the plan."""
        known = {"user_id": user_id, "claim_id": claim_id, "worker_id": worker.worker_id}
        sealed = []
        for credentials_row in stored:
            await asyncio.sleep(0)  # each takes about 0.3 ms, and a user may have `MAX_ACCOUNTS`
            account = credentials_row.account
            credentials = await vault.decrypt_credentials(
                credentials_row.encrypted,
                self.unwrapper,
                user_id=user_id,
                account_id=credentials_row.account_id,
            )
            counted = self.budgets.account(plan, credentials_row, credentials)
            clear = msgspec.json.encode(credentials)
            sealed.append(
                SealedAccount(
                    account_id=credentials_row.account_id,
                    broker=account.broker,
                    broker_type=account.broker_type,
                    simulation=account.simulation,
                    number=account.number,
                    version=credentials_row.version,
                    budgets=counted.names,
                    address_budgets=counted.address_names,
                    sealed=sealing.seal(
                        clear,
                        key,
                        account_id=credentials_row.account_id,
                        epoch=worker.epoch,
                        **known,
                    ),
                    books_first=self.books_first,
                )
            )
        share = share_permille(plan)
        sealed = [
            msgspec.structs.replace(
                account,
                address_share=share,
                address_shares=shares_by_kind(plan, account.account_id),
            )
            for account in sealed
        ]
        message_keys = self.secrets.for_worker(user_id, worker.epoch)
        return sealed, sealing.seal_message_keys(message_keys, key, epoch=worker.epoch, **known)


async def send_control(
    client: Redis, orchestrator_keys: OrchestratorKeys, message: ControlMessage
) -> None:
    """Signs a message for the worker that serves the user, and wakes it."""
    names = [keys.control(message.user_id), keys.doorbell(message.user_id)]
    signed = sealing.sign(message, *orchestrator_keys.signing_keys)
    await valkey.run_script(client, scripts.SEND_CONTROL, names, [signed])


async def push_signed(
    client: Redis, key: str, message: Message, signing: Iterable[Ed25519PrivateKey]
) -> None:
    """Puts a signed message on a worker's inbox, which expires after `CLAIM_TTL_S`."""
    async with client.pipeline(transaction=True) as pipe:
        pipe.rpush(key, sealing.sign(message, *signing))
        pipe.expire(key, keys.CLAIM_TTL_S)
        await pipe.execute()


class ClaimReplies:
    """The answers to one claim id or reload id."""

    def __init__(
        self,
        client: Redis,
        orchestrator_keys: OrchestratorKeys,
        worker: WorkerRef,
        reload_id: str = "",
    ) -> None:
        self._client = client
        self._keys = orchestrator_keys
        self._worker_id, self._claim_id = worker.worker_id, reload_id or worker.claim_id
        self._key = keys.pool_reply(worker.pool, self._worker_id, self._claim_id)
        self._refused = RefusalCounter(REFUSED.labels("claim reply").inc)

    async def present(self, attempt: int) -> ClaimReply | None:
        """Returns the answer to this attempt, if it has come.

        Removes answers to other attempts, and forged ones.
        """
        items: list[bytes] = await valkey.reply_of(
            self._client.lrange(self._key, 0, REPLIES_PER_READ - 1)
        )
        for item in items:
            reply = self._read(item)
            # A success of any attempt counts: the worker is connected.
            if reply is None or (reply.attempt < attempt and reply.failure is not None):
                await valkey.reply_of(self._client.lrem(self._key, 1, item))  # type: ignore[arg-type]
            else:
                return reply
        return None

    async def wait(self, attempt: int, timeout: float) -> ClaimReply | None:
        """Returns the answer to this attempt, or None after `timeout` seconds (less than the socket
        timeout)."""
        deadline = time.monotonic() + timeout
        while True:
            reply = await self.present(attempt)
            seconds_left = deadline - time.monotonic()
            if reply is not None or seconds_left <= 0:
                return reply
            # Any: redis-py's types do not know a fraction of a second.
            timeout_s: Any = max(seconds_left, 0.01)
            await valkey.reply_of(
                self._client.blmove(self._key, self._key, timeout_s, "LEFT", "RIGHT")
            )

    def _read(self, item: bytes) -> ClaimReply | None:
        """Returns the reply if it is the worker's own to this claim."""
        worker_id = self._worker_id
        try:
            reply = sealing.open_reply(item, *self._keys.launch_tokens(worker_id))
        except (MalformedMessage, InvalidSignature) as error:
            if self._refused.add(worker_id):
                log.warning(
                    "claim_reply_dropped",
                    claim_id=self._claim_id,
                    worker_id=worker_id,
                    reason=error.detail,
                )
            return None
        return reply if (reply.claim_id, reply.worker_id) == (self._claim_id, worker_id) else None
