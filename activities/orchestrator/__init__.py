"""Runs the orchestrator process: its clients, its task queues, its versions, its background loops.

Not here: the activities themselves, which are in the other folders of `activities`.
"""
