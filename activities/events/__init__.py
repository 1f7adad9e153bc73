"""Records what workers and launchers report, signals workflows, watches marks and quotas in
Valkey, and restores what Valkey has lost.

Not here: what a workflow does with a signal (`workflows/user_worker`), and the worker's side
(`worker_runtime/trading/send_buffer.py`).
"""
