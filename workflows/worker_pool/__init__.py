"""Keeps a pool at its wanted number of free workers.

Not here: counting, launching and stopping them (`activities/pool`), and who gets one
(`activities/claims`).
"""
