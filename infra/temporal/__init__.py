"""Connects to Temporal, encrypts its payloads, starts workflows, and keeps Schedules.

Not here: workflow code (`workflows`), and hosting it (`activities/orchestrator`).
"""
