"""A simulated worker's key pair and its proof: real ones, since the orchestrator seals to the key."""

from __future__ import annotations

from dataclasses import dataclass

from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.sealing import new_worker_key, prove_key


@dataclass(frozen=True)
class Identity:
    """The private half is dropped: nobody here opens what was sealed."""

    public_key: bytes
    proof: bytes

    @classmethod
    def of(cls, config: WorkerConfig) -> Identity:
        public_key = new_worker_key().public_key().public_bytes_raw()
        return cls(public_key, prove_key(config.launch_token, config.worker_id, public_key))
