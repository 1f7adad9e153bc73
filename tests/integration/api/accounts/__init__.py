"""Tests users, credentials, API keys, switches and webhooks over REST."""
