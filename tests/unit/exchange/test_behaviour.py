from __future__ import annotations

import pytest
from pydantic import ValidationError

from infra.exchange.behaviour import ALWAYS, Behaviour, FaultPoint


def test_a_fault_hits_as_often_as_it_was_set() -> None:
    behaviour = Behaviour(faults={FaultPoint.LOST_ACK: 2, FaultPoint.LOST_EVENT: 1})
    once = behaviour.after_fault(FaultPoint.LOST_ACK)
    twice = once.after_fault(FaultPoint.LOST_ACK)
    assert once.faults == {FaultPoint.LOST_ACK: 1, FaultPoint.LOST_EVENT: 1}
    assert twice.faults == {FaultPoint.LOST_EVENT: 1}


def test_a_fault_can_strike_until_it_is_taken_away() -> None:
    behaviour = Behaviour(faults={FaultPoint.LOST_ACK: ALWAYS})
    assert behaviour.after_fault(FaultPoint.LOST_ACK) is behaviour


def test_a_behaviour_survives_its_way_through_json() -> None:
    behaviour = Behaviour(latency_ms=5, reject_rate=0.25, faults={FaultPoint.LATE_ACK: 1})
    assert Behaviour.model_validate_json(behaviour.model_dump_json()) == behaviour


@pytest.mark.parametrize(
    "wrong", [{"latency": 5}, {"reject_rate": 2}, {"fill": "maybe"}, {"faults": {"x": 1}}]
)
def test_a_mistyped_behaviour_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Behaviour.model_validate(wrong)
