"""Implements the command `berth`: most commands call the REST API and print tables.

Not here: what a command does on the server (`api`), and starting the local servers (`infra/local`).
"""
