"""Tests the parts of a runner: children, registration, completion, telemetry."""
