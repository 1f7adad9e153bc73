"""Contains PostgreSQL's tables, migrations and queries, in a file for each aggregate.

Not here: when something is written, which callers decide (`api`, `activities`), and the tables of
kept jobs (`infra/jobs/kept.py`).
"""
