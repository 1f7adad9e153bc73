"""Tests `berth up`, `berth backup`, `berth restore` and key rotations with real processes."""
