"""Contains one file for each revision of the schema.

Not here: running them (`infra/database/migrate.py`).
"""
