"""MACs verify messages for their keys and parts only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_runtime.protocol.authentication import (
    MAX_MAC_LENGTH,
    AssignmentKeys,
    MessageKey,
    RefusalCounter,
    sign,
    verify,
)

OLD, NEW, FUTURE = (MessageKey(number, bytes([number]) * 32) for number in (1, 2, 3))


def test_a_mac_verifies_for_its_keys_and_parts_only() -> None:
    mac = sign([NEW], b"request/1", b"u", b"payload")
    assert verify([NEW], mac, b"request/1", b"u", b"payload")
    assert not verify([NEW], mac, b"answer/1", b"u", b"payload")
    assert not verify([NEW], mac, b"request/1", b"up", b"ayload")
    assert not verify([MessageKey(2, b"x" * 32)], mac, b"request/1", b"u", b"payload")


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ([OLD], [OLD]),
        ([NEW, OLD], [OLD]),  # the writer has read the new secret first
        ([OLD], [NEW, OLD]),  # the reader has
        ([FUTURE, NEW], [NEW, OLD]),
    ],
)
def test_neighbouring_versions_of_the_secret_understand_each_other(
    writer: list[MessageKey], reader: list[MessageKey]
) -> None:
    assert verify(reader, sign(writer, b"use", b"m"), b"use", b"m")


def test_only_one_text_of_a_mac_verifies_a_message() -> None:
    mac = sign([NEW, OLD], b"use", b"m")
    new, old = mac.split(",")
    others = [
        new,
        old,
        f"{old},{new}",
        f"{mac},{old}",
        f"{mac},",
        f"{mac},9.x",
        f"0{mac}",
        f"{new}=,{old}",
        f"{new},1.x",
    ]
    # Who holds only one of the two versions cannot know the other's MAC.
    unknown: dict[tuple[MessageKey, ...], list[str]] = {
        (NEW, OLD): [],
        (NEW,): [f"{new},1.x"],
        (OLD,): [f"{new}=,{old}"],
    }
    for reader, counting in unknown.items():
        assert verify(reader, mac, b"use", b"m")
        assert [other for other in others if verify(reader, other, b"use", b"m")] == counting


def test_a_version_that_was_dropped_does_not_count_any_more() -> None:
    assert not verify([FUTURE, NEW], sign([OLD], b"use", b"m"), b"use", b"m")


def test_a_mac_of_one_version_does_not_count_as_anothers() -> None:
    mac = sign([OLD], b"use").replace("1.", "2.", 1)
    assert not verify([NEW, OLD], mac, b"use")


def test_nothing_counts_without_keys_or_without_a_mac() -> None:
    assert sign([], b"use") == ""
    assert not verify([NEW], "", b"use")
    assert not verify([], sign([NEW], b"use"), b"use")
    assert not verify([NEW], sign([NEW], b"use") + "," * MAX_MAC_LENGTH, b"use")


@given(st.text(max_size=300))
def test_any_text_in_place_of_a_mac_is_refused_without_an_error(mac: str) -> None:
    assert not verify([NEW, OLD], mac, b"use")


def test_keys_are_not_shown() -> None:
    shown = repr(AssignmentKeys(request=(NEW,), assignment=(OLD,))) + repr(NEW)
    assert "\\x" not in shown


def test_every_refused_message_is_counted_and_the_first_of_each_sender_is_logged() -> None:
    counted: list[str] = []
    refused = RefusalCounter(lambda: counted.append("one more"))
    assert [refused.add("mallory") for _ in range(50)] == [True] + [False] * 49
    assert [refused.add("alice") for _ in range(2)] == [True, False]
    assert refused.count == len(counted) == 52


def test_a_sender_with_many_names_is_logged_for_a_hundred_of_them() -> None:
    refused = RefusalCounter()
    assert sum(refused.add(f"made-up-{number}") for number in range(1000)) == 100
    assert refused.count == 1000
