"""Old workers with a new API and orchestrator, and the other way round: each reads what the other
writes.

`releases/*.json` holds what earlier releases wrote, made by their own code (`record.py`), and the
shapes by which they read. Both directions are tried on bytes.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from temporalio.converter import value_to_type

from tests.contract.protocol import record
from tests.support import message_shapes
from workflows.user_worker.messages import ShutdownRequest

RELEASES = sorted(path.stem for path in record.FOLDER.glob("*.json"))
LAST = RELEASES[-1]

#: What an earlier release cannot read: (release, struct) → the value, and why that does no harm.
UNREAD: dict[tuple[str, str], tuple[str, str]] = {
    ("0.1.0", "messages.PlaceOrder"): (
        "MKP",
        "it answers MALFORMED_MESSAGE: such an order is not placed",
    ),
    ("0.1.0", "messages.Claim"): ("MKP", "open orders are sent as market orders"),
    ("0.1.0", "messages.ReloadCredentials"): ("MKP", "open orders are sent as market orders"),
    # What follows names the price type of orders at the broker, which is LMT or MKT.
    ("0.1.0", "exchange.Place"): ("MKP", "the paper exchange is of the release of its workers"),
    **{
        ("0.1.0", name): ("MKP", "reported as MKT")
        for name in (
            "exchange.ExchangeOrder",
            "exchange.ExchangeReply",
            "exchange.OrderChanged",
            "requests.AccountReport",
        )
    },
}


#: Dataclasses of earlier releases that others of today read: nothing on the wire names them.
READ_AS = {
    "Claimed": "WorkerLeft",
    "WorkerGone": "WorkerLeft",
    "SettleAbsent": "UnresolvedOrder",
    "DemandAttention": "UnresolvedOrder",
    "ScanFleet": "MaintenanceInput",
}

#: Messages of earlier releases that nothing of today writes or reads, and why.
GONE = {
    "jobs.FailedJob": "arguments of a job that `on_failed` names; the producer sees to "
    "failures itself"
}


def release(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(
        (record.FOLDER / f"{name}.json").read_text(encoding="utf-8")
    )
    return recorded


def test_there_is_a_release_to_compare_with() -> None:
    assert "0.1.0" in RELEASES
    assert len(release(LAST)["structs"]) > 40


@pytest.mark.parametrize("name", RELEASES)
def test_what_an_earlier_release_wrote_is_read_without_a_loss(name: str) -> None:
    today = message_shapes.structs()
    lost = []
    for key, kept in release(name)["structs"].items():
        for written in kept["messages"] if key not in GONE else ():
            try:
                read = json.loads(
                    msgspec.json.encode(msgspec.json.decode(written, type=today[key]))
                )
            except (KeyError, msgspec.ValidationError) as error:
                lost.append(f"{key}: {error!r} in {written}")
                continue
            lost += [f"{key}: {why}" for why in _differences(json.loads(written), read)]
    assert lost == []


@pytest.mark.parametrize("name", RELEASES)
def test_what_this_release_writes_is_read_by_an_earlier_one(name: str) -> None:
    old = release(name)["structs"]
    readers, now = message_shapes.Readers(old), record.recorded()["structs"]
    lost = []
    for key in old.keys() - GONE.keys():
        known, _ = UNREAD.get((name, key), ("nothing", ""))
        for written in now[key]["messages"]:
            try:
                msgspec.json.decode(written, type=readers.reader(key))
            except msgspec.ValidationError as error:
                if known not in str(error):
                    lost.append(f"{key}: {error} in {written}")
    assert lost == []


@pytest.mark.parametrize("name", RELEASES)
def test_what_crosses_temporal_only_grows(name: str) -> None:
    """A message of the other release lacks fields that are new, and has some that are gone."""
    today = message_shapes.dataclasses()
    lost = []
    for key, kept in release(name)["dataclasses"].items():
        reader = today.get(READ_AS.get(key, key))
        if reader is None:
            lost.append(f"{key} is gone")
            continue
        now = message_shapes.described_dataclass(reader)
        lost += [
            f"{key}.{field} is new and required"
            for field, must in now.items()
            if must and field not in kept
        ]
        lost += [
            f"{key}.{field} is gone and was required"
            for field, must in kept.items()
            if must and field not in now
        ]
    assert lost == []


@pytest.mark.parametrize("name", RELEASES)
def test_keys_and_codes_of_an_earlier_release_are_still_those(name: str) -> None:
    old, now = release(name), record.recorded()
    assert {key: now["keys"].get(key) for key in old["keys"]} == old["keys"]
    assert {code: now["errors"].get(code) for code in old["errors"]} == old["errors"]


def test_the_comparison_notices_what_it_should() -> None:
    """So that the tests above mean something: four changes that break a peer."""
    old = release(LAST)["structs"]
    reader = message_shapes.Readers(old).reader("messages.Shutdown")
    good = json.loads(old["messages.Shutdown"]["messages"][0])
    assert msgspec.json.decode(json.dumps(good | {"new": 1}), type=reader)
    for bad in (good | {"epoch": "seven"}, {**good, "type": "another"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(json.dumps(bad), type=reader)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            json.dumps({name: value for name, value in good.items() if name != "epoch"}),
            type=reader,
        )
    kind = message_shapes.Readers(old).reader("messages.WorkerEvent")
    event = json.loads(old["messages.WorkerEvent"]["messages"][0])
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(event | {"kind": "of a later release"}), type=kind)
    assert _differences({"a": 1, "b": [1]}, {"a": 1, "b": []}) == ["b: [1] became []"]


def test_temporal_s_converter_ignores_fields_that_it_does_not_know() -> None:
    """What the comparison of dataclasses rests on."""
    read = value_to_type(ShutdownRequest, {"reason": "why", "of_a_later_release": True})
    assert read == ShutdownRequest(reason="why")


def _differences(written: dict[str, Any], read: dict[str, Any]) -> list[str]:
    """Fields that were lost or became something else; new ones do not matter."""
    return [
        f"{name}: {value} became {read.get(name)}"
        for name, value in written.items()
        if not _within(value, read.get(name))
    ]


def _within(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_within(value, new.get(name)) for name, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_within, old, new))
    return bool(old == new)
