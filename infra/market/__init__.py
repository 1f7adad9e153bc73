"""Knows the brokers' markets by their records: trading days and hours, symbols, lots.

Not here: the records (`worker_runtime/brokers`), prices and orders, and the hours of the paper
exchange (`infra/exchange/hours.py`).
"""
