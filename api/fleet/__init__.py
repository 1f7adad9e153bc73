"""Shows the health, metrics and servers of the fleet,
alerts operators, and chooses the primary API process.

Not here: the clean-up itself (`activities/maintenance`),
single workers (`api/workers`), and pools (`api/pools`).
"""
