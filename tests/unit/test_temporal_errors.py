"""Tests what a failed call to Temporal means to the caller of the API."""

from __future__ import annotations

import pytest
from temporalio.service import RPCError, RPCStatusCode

from infra.temporal.client import OrchestratorUnavailable, TemporalUnavailable, error_of_rpc


@pytest.mark.parametrize(
    "text",
    ["buffered query cleared, please retry", "timeout locking workflow execution"],
)
def test_a_server_that_could_not_ask_a_workflow_is_not_called_unreachable(text: str) -> None:
    error = error_of_rpc(RPCError(text, RPCStatusCode.UNAVAILABLE, b""))
    assert type(error) is OrchestratorUnavailable
    assert error.retryable


def test_a_server_that_does_not_answer_is_called_unreachable() -> None:
    error = error_of_rpc(RPCError("tcp connect error", RPCStatusCode.UNAVAILABLE, b""))
    assert type(error) is TemporalUnavailable
