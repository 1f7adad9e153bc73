"""What a bench says of the machine's CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from infra.lab import cpu
from infra.lab.cpu import StolenTime


class Times(NamedTuple):
    """As `psutil` gives them on Linux; guests are in `user` already."""

    user: float
    system: float
    idle: float
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


def set_times(monkeypatch: pytest.MonkeyPatch, *times: tuple[float, ...]) -> None:
    answers: Iterator[tuple[float, ...]] = iter(times)
    monkeypatch.setattr(cpu, "psutil", SimpleNamespace(cpu_times=lambda: next(answers)))


def test_stolen_time_is_a_share_of_what_the_machine_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, Times(100, 50, 900, 5, 20, 30), Times(130, 80, 990, 9, 40, 40))
    # 60 s of CPU time were had, 20 were wanted and given to others; idle time is neither.
    stolen = StolenTime()
    assert stolen.percent() == pytest.approx(25.0)


def test_an_idle_machine_had_nothing_stolen(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, Times(100, 50, 900), Times(100, 50, 990))
    assert StolenTime().percent() == 0.0


def test_this_machine_shows_a_share() -> None:
    assert 0.0 <= StolenTime().percent() <= 100.0
