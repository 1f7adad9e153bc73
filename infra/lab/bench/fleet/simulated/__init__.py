"""Simulates a node and its workers:
what the orchestrator sees of thousands of workers, in one process.

It serves the node's real socket protocol, so the real launcher talks to it unchanged. Each worker
does on Valkey what a real one does: it announces itself with a proven key, settles and answers its
claim, renews its mark, takes control messages, and ends. It has no broker: a login succeeds after a
moment, an order is refused.

Not here: checks of signatures and credentials (a simulated worker trusts what it reads), and fleets
that are only written into the servers (`infra/lab/bench/fleet/planted_fleet.py`).
"""
