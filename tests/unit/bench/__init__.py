"""Tests the parts of the benchmarks: aims, figures, options."""
