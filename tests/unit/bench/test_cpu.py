"""A bench reports the machine's CPU time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from infra.lab.cpu import StolenTime


class Times(NamedTuple):
    """Holds CPU times as `psutil` gives them on Linux; guests are in `user` already."""

    user: float
    system: float
    idle: float
    iowait: float = 0.0
    steal: float = 0.0
    guest: float = 0.0


def read_in_turn(*times: Times) -> Callable[[], Times]:
    return partial(next, iter(times))


def test_stolen_time_is_a_share_of_what_the_machine_wanted() -> None:
    read = read_in_turn(Times(100, 50, 900, 5, 20, 30), Times(130, 80, 990, 9, 40, 40))
    # 60 s of CPU time were had, 20 were wanted and given to others; idle time is neither.
    assert StolenTime(read).percent() == pytest.approx(25.0)


def test_an_idle_machine_had_nothing_stolen() -> None:
    read = read_in_turn(Times(100, 50, 900), Times(100, 50, 990))
    assert StolenTime(read).percent() == 0.0


def test_this_machine_shows_a_share() -> None:
    assert 0.0 <= StolenTime().percent() <= 100.0
