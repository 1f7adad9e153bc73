"""Which types of jobs are brief."""

from __future__ import annotations

from worker_runtime.jobs.prefetch import BRIEF_RUNTIME, RuntimeEstimate


def quick(pace: RuntimeEstimate, name: str = "n", times: int = 20) -> None:
    for _ in range(times):
        pace.ran(name, BRIEF_RUNTIME / 10)


def test_a_type_is_brief_after_some_quick_runs_and_not_before() -> None:
    pace = RuntimeEstimate()
    assert pace.brief == ""
    pace.ran("n", 0.0)
    assert not pace.is_brief("n")
    quick(pace)
    assert pace.is_brief("n")
    quick(pace, "m")
    assert pace.brief == "m,n"


def test_one_moment_without_cpu_does_not_make_a_type_slow_but_slow_runs_do() -> None:
    pace = RuntimeEstimate()
    quick(pace)
    pace.ran("n", 60.0)
    assert pace.is_brief("n")
    pace.ran("n", 60.0)
    assert not pace.is_brief("n")
    assert pace.brief == ""
    quick(pace)
    assert pace.is_brief("n")


def test_runs_of_middling_length_are_not_brief() -> None:
    pace = RuntimeEstimate()
    for _ in range(100):
        pace.ran("n", 0.005)
    assert not pace.is_brief("n")
