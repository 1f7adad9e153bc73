"""Manages the names that operators give to symbols for signals.

Not here: translating a signal's symbol (`infra/market/signal_symbols.py`).
"""
