"""Starts and stops workers on a platform: the launcher port and its adapters.

A worker's memory limits are in `infra/worker_task.py`, for all launchers.

Not here: when to launch and stop (`activities/pool`, `activities/claims`), and keeping local
processes (`infra/node`).
"""
