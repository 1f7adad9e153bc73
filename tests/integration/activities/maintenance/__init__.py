"""Tests scans, clean-up, the mark watcher and the morning."""
