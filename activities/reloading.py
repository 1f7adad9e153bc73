"""New credentials for a worker that runs."""

from __future__ import annotations

import time

from redis.asyncio import Redis
from temporalio import activity

from activities import slot
from activities.claiming import WAIT_SLICE
from activities.replies import Replies
from activities.seals import sealed_accounts
from activities.slot import ask
from infra import valkey
from infra.database import accounts
from infra.database.engine import Database
from infra.vault.master_key import KeyUnwrapper
from infra.vault.orchestrator_keys import OrchestratorKeys
from worker_runtime.protocol import errors, keys, scripts, sealing
from worker_runtime.protocol.messages import ReloadCredentials
from workflows import messages as m


class Reloading:
    """Activity `reload_credentials`."""

    def __init__(
        self,
        client: Redis,
        database: Database,
        unwrapper: KeyUnwrapper,
        orchestrator_keys: OrchestratorKeys,
    ) -> None:
        self._client = client
        self._database = database
        self._unwrapper = unwrapper
        self._keys = orchestrator_keys

    @activity.defn
    async def reload_credentials(self, request: m.ReloadRequest) -> m.ReloadResult:
        """Seals the user's accounts to the worker's present key and waits for its answer.

        A repeat finds the answer or sends the same again, which changes nothing for the worker: it looks
        at the accounts' versions.
        """
        worker = request.worker
        replies = Replies(self._client, worker.pool, request.reload_id)
        if await replies.present(worker.worker_id, 0) is None:
            public_key = await self._public_key(request)
            if not public_key:
                return _failed("the worker's public key is not known")
            await self._send(request, public_key)
        began = time.monotonic()
        while time.monotonic() - began < request.timeout:
            activity.heartbeat()
            reply = await replies.wait(worker.worker_id, 0, WAIT_SLICE)
            if reply is not None and reply.failure is None:
                return m.ReloadResult(ok=True)
            if reply is not None and reply.failure is not None:
                failure = reply.failure
                return m.ReloadResult(ok=False, failure_code=failure.code, failure_detail=failure.detail)
        return _failed("the worker did not answer in time")

    async def _send(self, request: m.ReloadRequest, public_key: bytes) -> None:
        worker, user = request.worker, request.user_id
        async with self._database.session() as session:
            stored = await accounts.of_user(session, user)
        message = ReloadCredentials(
            reload_id=request.reload_id,
            user_id=user,
            epoch=worker.epoch,
            worker_id=worker.worker_id,
            accounts=await sealed_accounts(
                stored,
                self._unwrapper,
                public_key,
                epoch=worker.epoch,
                claim_id=request.reload_id,
                worker_id=worker.worker_id,
            ),
        )
        signed = sealing.sign(message, self._keys.signing_key)
        await valkey.run(self._client, scripts.CONTROL, [keys.control(user), keys.doorbell(user)], [signed])

    async def _public_key(self, request: m.ReloadRequest) -> bytes:
        """The key of the worker's present session, if it is proven; else the one proven at the claim.

        A session that was replaced in place has a new key pair: it then answers that it cannot open
        what was sealed to the old one.
        """
        worker_id = request.worker.worker_id
        fields = await ask(self._client.hmget(keys.metadata(request.user_id), ["public_key", "proof"]))
        try:
            key, proof = (bytes.fromhex((value or b"").decode("ascii")) for value in fields)
        except ValueError:
            key = proof = b""
        found = slot.Slot(status="again", worker_id=worker_id, public_key=key, proof=proof)
        return key if found.proven(self._keys) else bytes.fromhex(request.worker.public_key)


def _failed(why: str) -> m.ReloadResult:
    return m.ReloadResult(ok=False, failure_code=errors.WorkerUnavailable.code, failure_detail=why)
