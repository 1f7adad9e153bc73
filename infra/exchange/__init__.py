"""Implements the paper exchange: a small broker with a durable ledger, which judges our tests.

`infra/exchange/matching.py` fills orders, `infra/exchange/ledger.py` records them, and
`infra/exchange/behaviour.py` lets tests make the exchange fail.

Not here: the worker's adapter for it (`worker_runtime/brokers/paper/broker.py`), and its messages
(`worker_runtime/brokers/paper/wire.py`).
"""
