"""Contains the settings of the fuzz tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("BERTH_FUZZ_EXAMPLES", "12"))


fuzz_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


fuzz_timeout = pytest.mark.timeout(120 + EXAMPLES * 2)
