"""Tests the benchmarks with small numbers, and how their costs grow."""
