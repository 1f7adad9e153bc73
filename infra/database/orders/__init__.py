"""Contains the queries of orders: acceptance, events, lists, changes, the sweeper's schedule.

Not here: switches, limits and webhooks (`infra/database/trading`).
"""
