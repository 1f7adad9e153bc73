"""Loads the instruments that a broker lists: asks a worker for the pages, and puts them in force.

Not here: when a load is tried, and again (`workflows/instruments`), and the statements
(`infra/database/trading/instrument_loads.py`).
"""
