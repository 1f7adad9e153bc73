"""Tests broker sessions, doorbell, mark, replacement and the Valkey client."""
