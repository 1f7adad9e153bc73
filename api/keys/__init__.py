"""Manages API keys and allowed worker images, and shows the audit trail.

Not here: checking a key on each request (`api/http/auth.py`), and what a role may do
(`api/http/rights.py`).
"""
