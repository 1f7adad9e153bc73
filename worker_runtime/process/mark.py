"""The worker's sign of life in Valkey: its pool entry until it is assigned, then the user's mark.

The supervisor renews it every `mark_period`. The session renews it, too, when it is ready, claimed and
connected, so that nobody has to wait for the supervisor.
"""

from __future__ import annotations

from worker_runtime.process.clock import boot_ns, wall_ms
from worker_runtime.process.shared_state import SharedState, WorkerActivity, health_text, lease_end_of
from worker_runtime.process.valkey import Argument, Valkey
from worker_runtime.protocol import keys
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from worker_runtime.protocol.scripts import ANNOUNCE_WORKER, REMOVE_MARK, RENEW_MARK
from worker_runtime.protocol.sealing import prove_key


def new_worker_event(
    config: WorkerConfig, shared_state: SharedState, sequence: int, kind: WorkerEventKind, detail: str
) -> WorkerEvent:
    """An event in the life of this worker, now. `sequence` comes from the shared state."""
    return WorkerEvent(
        worker_id=config.worker_id,
        user_id=shared_state.user_id,
        epoch=shared_state.epoch,
        sequence=sequence,
        kind=kind,
        at_ms=wall_ms(),
        detail=detail,
    )


class WorkerMark:
    """Writes the pool entry and the mark of one worker. All calls may raise `ValkeyFailed`."""

    def __init__(self, config: WorkerConfig, shared_state: SharedState) -> None:
        self._config = config
        self._shared_state = shared_state

    def announce(self, client: Valkey) -> str:
        """Renews the pool entry; returns its state (see `announce_worker.lua`), or '' while there is no key
        yet."""
        config = self._config
        public_key = self._shared_state.public_key()
        if not public_key:
            return ""
        proof = prove_key(config.launch_token, config.worker_id, public_key)
        state: bytes = client.run(
            ANNOUNCE_WORKER,
            [
                keys.pool_worker(config.pool, config.worker_id),
                keys.pool_ready(config.pool),
                keys.pool_claim(config.pool, config.reserved_claim),
                keys.pool_born(config.pool, config.reserved_claim),
            ],
            [
                config.worker_id,
                int(config.mark_ttl * 1000),
                config.reserved_claim,
                keys.CLAIM_TTL,
                *("public_key", public_key, "proof", proof),
                *("task", config.task_id, "version", config.version),
            ],
        )
        return state.decode()

    def renew(self, client: Valkey) -> tuple[str, int]:
        """Renews the mark: ('ok', end of the lease in boot ns), ('fenced', 0) or ('no_owner', 0)."""
        config, shared_state = self._config, self._shared_state
        if shared_state.jobs_pid:  # jobs count as activity; without jobs the runner ends
            shared_state.last_activity_ms = wall_ms()
        user_id = shared_state.user_id
        session = shared_state.session_number  # before the key, so that the key is not an older session's
        public_key = shared_state.public_key()  # empty while a fresh session has not made its own
        proof = prove_key(config.launch_token, config.worker_id, public_key) if public_key else b""
        sent = boot_ns()
        metadata: dict[str, Argument] = {
            "task": config.task_id,
            "worker": config.worker_id,
            "epoch": shared_state.epoch,
            "version": config.version,
            "state": WorkerActivity(shared_state.state).name,
            "launched_at": shared_state.launched_at_ms,
            "last_activity_ms": shared_state.last_activity_ms,
            "session": session,
            "public_key": public_key.hex(),
            "proof": proof.hex(),
            "pid": shared_state.session_pid,
            "claim": shared_state.claim_id,
            "health": health_text(shared_state),
            "connected": f"{shared_state.accounts_connected}/{shared_state.accounts}",
        }
        names = [keys.owner(user_id), keys.mark(user_id), keys.metadata(user_id)]
        words = [word for field in metadata.items() for word in field]
        caller = (shared_state.epoch, config.worker_id, int(config.mark_ttl * 1000))
        outcome: bytes = client.run(RENEW_MARK, names, [*caller, *words])
        if outcome != b"ok":
            return outcome.decode(), 0
        return "ok", lease_end_of(sent, config.mark_ttl)

    def remove(self, client: Valkey) -> None:
        """Removes the mark, or the pool entry of an unclaimed worker."""
        config, shared_state = self._config, self._shared_state
        if shared_state.assigned:
            names = [keys.mark(shared_state.user_id), keys.metadata(shared_state.user_id)]
            client.run(REMOVE_MARK, names, [f"{shared_state.epoch}:{config.worker_id}"])
        else:
            client.pipeline(
                [
                    ("ZREM", keys.pool_ready(config.pool), config.worker_id),
                    ("DEL", keys.pool_worker(config.pool, config.worker_id)),
                ]
            )
