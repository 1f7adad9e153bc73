"""The configuration of a worker that connects to nothing."""

from __future__ import annotations

from worker_runtime.protocol.launch import WorkerConfig

CONFIG = WorkerConfig(
    worker_id="w1",
    pool="p1",
    valkey_url="redis://127.0.0.1:6379/0",
    launch_token=b"t" * 32,
    orchestrator_keys=(b"k" * 32,),
)
