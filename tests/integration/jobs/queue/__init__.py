"""Tests the queue's scripts without a runner, also against a model."""
