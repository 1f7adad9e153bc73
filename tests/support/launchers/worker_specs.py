"""What the suite launches."""

from __future__ import annotations

from infra.worker_task import MEMORY_HARD_BYTES, MEMORY_SOFT_BYTES, LaunchSpec
from worker_runtime.protocol.launch import WorkerConfig

#: In every config; must never be seen outside of the worker's standard input.
CANARY = b"canary-launch-token-4711"


def spec(
    worker_id: str,
    behaviour: str = "plain",
    *,
    memory_hard: int = MEMORY_HARD_BYTES,
) -> LaunchSpec:
    """A stand-in worker; see `stand_in_worker.py` for what it can do. `memory_hard` is in bytes."""
    return LaunchSpec(
        config=WorkerConfig(
            worker_id=worker_id,
            pool="default",
            valkey_url="redis://127.0.0.1:1/0",
            launch_token=CANARY,
            orchestrator_keys=(bytes(32),),
            version=behaviour,
        ),
        memory_soft=min(memory_hard, MEMORY_SOFT_BYTES),
        memory_hard=memory_hard,
    )
