"""Explores a model of the invariant one-owner exhaustively."""
