"""Defines what crosses Valkey: keys, messages, errors, scripts, sealing. Servers import it, too.

Not here: sending and receiving (`infra/valkey` on the servers' side,
`worker_runtime/session` in a worker).
"""
