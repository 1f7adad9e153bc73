"""Tests the pump, the recorder, the relay and the watchers of exits."""
