"""Sends each user's daily statement, and makes the daily report.

Not here: their contents (`activities/reports`).
"""
