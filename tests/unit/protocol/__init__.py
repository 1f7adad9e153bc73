"""Tests messages, frames, bounds, sealing and authentication."""
