"""What a child sends to its runner fits into one packet, whatever the job has said."""

from __future__ import annotations

import msgspec
import pytest

from worker_runtime.jobs.child_process import (
    MAX_DETAIL_LENGTH,
    MAX_PACKET_BYTES,
    MAX_TRACEBACK_LENGTH,
    RunOutcome,
    describe_error,
    encode_outcome,
    read_report,
)
from worker_runtime.jobs.protocol.messages import MAX_RESULT_BYTES
from worker_runtime.protocol.messages import Failure


@pytest.mark.parametrize("character", ["\0", "\udce9", "\U0001f600"])
def test_an_outcome_fits_into_a_packet_with_any_characters(character: str) -> None:
    outcome = RunOutcome(
        fence=7,
        value=msgspec.Raw(b'"' + b"x" * (MAX_RESULT_BYTES - 2) + b'"'),
        failure=Failure(code="JOB_FAILED", detail=character * MAX_DETAIL_LENGTH, retryable=True),
        traceback=character * MAX_TRACEBACK_LENGTH,
        output=character * 16_384,
    )
    packet = encode_outcome(outcome)
    report = read_report(packet)
    assert len(packet) <= MAX_PACKET_BYTES
    assert isinstance(report, RunOutcome)
    assert report.value == outcome.value
    assert report.failure is not None
    assert report.failure.retryable
    assert report.output


def test_an_ordinary_outcome_is_sent_as_it_is() -> None:
    outcome = RunOutcome(fence=7, traceback="t" * MAX_TRACEBACK_LENGTH, output="é" * 16_384)
    assert read_report(encode_outcome(outcome)) == outcome


def test_an_error_that_cannot_describe_itself_is_described_by_its_type() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise SystemExit

    sentence, text = describe_error(Untold())
    assert sentence == "Untold: its text raised SystemExit"
    assert "Untold" in text
