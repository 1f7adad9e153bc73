"""Fixtures for pytest, which finds them by itself where `berth-jobs` is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .testing import InlineRunner, Recorder, record, run_inline


@pytest.fixture
def berth_jobs_recorded() -> Iterator[Recorder]:
    """Records the jobs that the test enqueues, and runs none (`berth_jobs.testing.record`)."""
    with record() as recorder:
        yield recorder


@pytest.fixture
def berth_jobs_inline() -> Iterator[InlineRunner]:
    """Runs the jobs that the test enqueues at once (`berth_jobs.testing.run_inline`)."""
    with run_inline() as runner:
        yield runner
