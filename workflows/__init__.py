"""Deterministic workflows: who has which worker, since when, what next."""
