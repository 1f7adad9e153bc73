"""Knows the exchanges of Taiwan: trading days and hours, symbols, lots.

Not here: prices and orders, and the hours of the paper exchange (`infra/exchange/hours.py`).
"""
