"""Loads the instruments that brokers list, each trading day before their markets open.

Not here: asking a worker for the list and putting it in force (`activities/instruments`).
"""
