"""The worker's sign of life in Valkey: its pool entry until it is assigned, then the user's mark.

The supervisor renews it every `mark_period`. The session renews it, too, when it is ready, claimed
and connected, so that nobody has to wait for the supervisor.
"""

from worker_runtime.process.clock import NS_PER_MS, NS_PER_S, boot_ns, wall_ms
from worker_runtime.process.shared_state import (
    SharedState,
    WorkerActivity,
    health_text,
    lease_end_of,
)
from worker_runtime.process.valkey import Argument, Valkey, ValkeyFailed
from worker_runtime.protocol import keys
from worker_runtime.protocol.installed_brokers import announced_brokers
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.messages import WorkerEvent, WorkerEventKind
from worker_runtime.protocol.scripts import ANNOUNCE_WORKER, REMOVE_MARK, RENEW_MARK
from worker_runtime.protocol.sealing import prove_key
from worker_runtime.protocol.worker_reports import VALID_UNTIL, sign_metadata

#: Between two reads of Valkey's clock.
_CLOCK_READ_INTERVAL_NS = 60 * NS_PER_S


def new_worker_event(
    config: WorkerConfig,
    shared_state: SharedState,
    sequence: int,
    kind: WorkerEventKind,
    detail: str,
) -> WorkerEvent:
    """Returns an event in the life of this worker, as of now. `sequence` comes from the shared
    state."""
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
        #: Valkey's Unix time less our boot time, in ms; and boot ns from which it is read again.
        self._clock_ms, self._clock_due = 0, 0

    def announce(self, client: Valkey) -> str:
        """Renews the pool entry; returns its state (see `announce_worker.lua`). Returns '' if the
        session has no key yet, or if the pool does not know the worker, which then asks to join."""
        config = self._config
        public_key = self._shared_state.public_key()
        if not public_key:
            return ""
        proof = prove_key(config.launch_token, config.worker_id, public_key)
        state: bytes = client.run(
            ANNOUNCE_WORKER,
            [keys.pool_worker(config.pool, config.worker_id)],
            [
                int(config.mark_ttl * 1000),
                "public_key",
                public_key,
                "proof",
                proof,
                "reserved",
                config.reserved_claim,
                "task",
                config.task_id,
                "version",
                config.version,
                "brokers",
                announced_brokers(),
            ],
        )
        if not state:
            client.execute("RPUSH", keys.EVENT_BELL, f"{config.pool} {config.worker_id}")
        return state.decode()

    def renew(self, client: Valkey) -> tuple[str, int]:
        """Renews the mark: ('ok', end of the lease in boot ns), ('fenced', 0) or ('no_owner',
        0)."""
        config, shared_state = self._config, self._shared_state
        if shared_state.jobs_pid:  # jobs count as activity; without jobs the runner ends
            shared_state.last_activity_ms = wall_ms()
        user_id = shared_state.user_id
        # Read before the key, so that the key is not an older session's.
        session = shared_state.session_number
        public_key = shared_state.public_key()  # empty while a fresh session has not made its own
        proof = prove_key(config.launch_token, config.worker_id, public_key) if public_key else b""
        valid_until = self._valid_until_ms(client)
        sent = boot_ns()
        metadata: dict[str, str | int] = {
            "task": config.task_id,
            "worker": config.worker_id,
            "epoch": shared_state.epoch,
            "version": config.version,
            "brokers": announced_brokers(),
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
            VALID_UNTIL: valid_until,
        }
        signed = sign_metadata(metadata, user_id, shared_state.message_keys().assignment)
        names = [keys.owner(user_id), keys.mark(user_id), keys.metadata(user_id)]
        words: list[Argument] = [word for field in signed.items() for word in field]
        caller = (shared_state.epoch, config.worker_id, int(config.mark_ttl * 1000))
        try:
            outcome: bytes = client.run(RENEW_MARK, names, [*caller, *words])
        except ValkeyFailed:
            self._clock_due = 0  # another server may answer next
            raise
        if outcome != b"ok":
            return outcome.decode(), 0
        return "ok", lease_end_of(sent, config.mark_ttl)

    def _valid_until_ms(self, client: Valkey) -> int:
        """Returns until when metadata count that are written now: Unix ms by Valkey's clock."""
        if boot_ns() >= self._clock_due:
            seconds, micros = client.execute("TIME")
            self._clock_ms = int(seconds) * 1000 + int(micros) // 1000 - boot_ns() // NS_PER_MS
            self._clock_due = boot_ns() + _CLOCK_READ_INTERVAL_NS
        return self._clock_ms + boot_ns() // NS_PER_MS + int(self._config.mark_ttl * 1000)

    def remove(self, client: Valkey) -> None:
        """Removes the mark, or the pool entry of a worker without an assignment."""
        config, shared_state = self._config, self._shared_state
        if shared_state.assigned:
            names = [keys.mark(shared_state.user_id), keys.metadata(shared_state.user_id)]
            client.run(REMOVE_MARK, names, [f"{shared_state.epoch}:{config.worker_id}"])
        else:
            client.execute("DEL", keys.pool_worker(config.pool, config.worker_id))
