"""Replays recorded workflow histories, so that running workflows survive a release."""
