"""Tests the broker port: the fake, the paper exchange's adapter, and Shioaji's."""
