"""Sends well-typed, absurd messages to every loop that reads messages."""
