"""A node whose workers are simulated: what the orchestrator sees of thousands of workers, in one process.

It serves the node's real socket protocol, so the real launcher talks to it unchanged. Each worker does on
Valkey what a real one does: it announces itself with a proven key, settles and answers its claim, renews its
mark, takes control messages, and ends. It has no broker: a login succeeds after a moment, an order is
refused. It trusts what it reads: it checks no signature and opens no
credentials, so it is no test of either.
"""
