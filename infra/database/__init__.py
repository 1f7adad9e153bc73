"""Contains PostgreSQL's tables, migrations and queries, in a file for each aggregate.

Not here: when something is written, which callers decide (`api`, `activities`), the tables of
applications (`infra/jobs/applications.py`, `infra/jobs/registry.py`), and questions about
PostgreSQL itself (`infra/doctor`, `infra/recovery`).
"""
