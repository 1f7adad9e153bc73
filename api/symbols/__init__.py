"""Manages the names that operators give to symbols for signals.

There is no `service.py`: each route is one statement of `infra/database/trading/symbol_names.py`.

Not here: translating a signal's symbol (`infra/market/signal_symbols.py`).
"""
