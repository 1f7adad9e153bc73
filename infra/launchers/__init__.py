"""Starts and stops workers on a platform: the launcher port and its adapters.

Not here: when to launch and stop (`activities/pool`, `activities/claims`), and keeping local
processes (`infra/node`).
"""
