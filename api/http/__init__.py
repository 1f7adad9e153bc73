"""Handles what every request needs: authentication, rights, limits, errors, event streams.

Not here: anything about one feature; a feature's router, schemas and service are in its own folder.
"""
