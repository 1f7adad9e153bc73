"""Knows the brokers' markets by their records: trading days and hours, symbols, lots.

Not here: the records (`worker_runtime/brokers`), reading them and their tables of holidays
(`worker_runtime/protocol/broker_record.py`), prices and orders, and the hours of the paper
exchange (`infra/exchange/hours.py`).
"""
