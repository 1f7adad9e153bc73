"""`berth chaos orders` in its short form: no order is lost, doubled or filled differently, whatever
breaks.

A longer chaos run, with another seed (the option lets a test run for longer than 5 minutes):

    BERTH_CHAOS_MINUTES=5 BERTH_CHAOS_SEED=7 \\
      make test ARGS="tests/chaos/test_orders.py -o faulthandler_timeout=0"
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest

from infra.lab.chaos.orders import experiment

MINUTES = float(os.environ.get("BERTH_CHAOS_MINUTES", "0.4"))
SEED = int(os.environ.get("BERTH_CHAOS_SEED", "1"))
#: Seconds that everything gets to settle.
SETTLE = 90.0
#: Waits that suit a chaos run of half a minute. 5 s of a mark's life are the lease's margin.
SHORT: dict[str, Any] = {
    "mark_ttl": 7.0,
    "mark_period": 0.5,
    "pulse_timeout": 3.0,
    "connect_timeout": 5.0,
    "health_period": 5.0,
    "order_deadline": 10.0,
    "absent_after": 3.0,
}


@pytest.mark.slow
@pytest.mark.timeout(240 + 90 * MINUTES)
def test_no_order_is_lost_or_doubled_whatever_breaks() -> None:
    run_chaos("paper")


@pytest.mark.drill
@pytest.mark.needs("shioaji")
@pytest.mark.timeout(240 + 90 * MINUTES)
def test_no_order_is_lost_or_doubled_at_the_stand_in_for_shioaji() -> None:
    run_chaos("shioaji")


def run_chaos(broker: str) -> None:
    result = experiment.run(
        MINUTES,
        SEED,
        6,
        3.0,
        server_every=6.0,
        patience=20.0,
        settle=SETTLE,
        broker=broker,
        **SHORT,
    )
    story = json.dumps({**result, "schedule": "…"}, indent=1)
    logging.getLogger(__name__).info("chaos run %s", story)  # seen with --log-cli-level=INFO
    assert result["orders"] > 20 * MINUTES, story
    assert result["kills"] > 20 * MINUTES, story
    for harm in ("lost", "doubled", "mismatched", "out_of_turn", "two_owners", "bans", "unsettled"):
        assert result[harm] == 0, story
