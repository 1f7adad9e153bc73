"""Counts and replaces workers by version, and keeps the record of a rollout's canary.

Not here: the order of a rollout's steps (`workflows/rollout`), and versions of the orchestrator
(`activities/orchestrator`).
"""
