"""Moves a pool's free workers and its users to another version, or back.

Not here: rollouts of the orchestrator (`activities/orchestrator`).
"""
