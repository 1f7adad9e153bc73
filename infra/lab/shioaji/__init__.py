"""A stand-in for Shioaji's client that trades at the paper exchange, for chaos runs.

Not here: the stand-in of the contract tests, whose market each test sets up by hand
(`tests/contract/brokers`).
"""
