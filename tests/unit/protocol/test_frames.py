"""Frames: an item of a queue is read, or malformed and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.message_signing import SECRETS
from worker_runtime.protocol import requests
from worker_runtime.protocol.errors import MalformedMessage

request_ids = st.text(st.characters(codec="ascii", exclude_characters="|"), max_size=40)


@given(deadline=st.integers(0, 10**15 - 1), request_id=request_ids, payload=st.binary(max_size=300))
def test_a_frame_is_read_back_as_it_was_built(
    deadline: int, request_id: str, payload: bytes
) -> None:
    keys = SECRETS.request_keys("u")
    mac = requests.sign_request(keys, "u", request_id, deadline, payload)
    frame = requests.parse_frame(
        b"%d|%s|%s|%s" % (deadline, request_id.encode(), mac.encode(), payload)
    )
    assert (frame.deadline_ms, frame.request_id, frame.payload) == (deadline, request_id, payload)
    assert frame.is_authentic(keys, "u")
    assert not frame.is_authentic(keys, "v")


@pytest.mark.parametrize("digits", [16, 4_299, 5_000])
def test_a_deadline_of_absurd_length_is_malformed_and_no_other_error(digits: int) -> None:
    with pytest.raises(MalformedMessage):
        requests.parse_frame(b"9" * digits + b"|r|mac|payload")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1",
        b"1|r",
        b"1|r|m",
        b"-1|r|m|x",
        b" 1|r|m|x",
        b"x|r|m|x",
        b"01|r|m|x",
        b"1|\xff|m|x",
        b"1|r|\xff|x",
    ],
)
def test_bytes_that_are_not_a_frame_are_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        requests.parse_frame(raw)
