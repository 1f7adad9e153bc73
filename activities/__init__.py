"""Runs what workflows ask for, and the orchestrator process that hosts workflows and activities.

Not here: decisions about what happens next (`workflows`), and clients of servers (`infra`).
"""
