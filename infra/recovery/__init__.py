"""Implements `berth backup` and `berth restore`.

Not here: recovering single orders or jobs after a crash (`activities/orders`,
`activities/maintenance`).
"""
