"""Looks up the instruments that brokers list, and lets operators designate who lists them.

Not here: loading a list (`activities/instruments`), and checks of orders (`api/orders/checks.py`).
"""
