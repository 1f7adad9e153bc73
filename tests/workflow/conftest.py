"""The time-skipping server, from the package that brings its program: the SDK would download it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from infra.local.servers import TemporalServer
from tests.support.workflows.fakes import FakeFleet, FakePool
from workflows.names import SEARCH_ATTRIBUTES


@pytest.fixture
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """A server of its own for each test, whose clock jumps over timers while nothing runs."""
    program = Path(sys.executable).with_name("temporal-test-server")
    starting = WorkflowEnvironment.start_time_skipping(
        test_server_existing_path=str(program),
        test_server_startup_timeout=timedelta(seconds=30),  # 5 by default
    )
    async with await starting as env:
        await env.client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=env.client.namespace,
                search_attributes={
                    name: IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD for name in SEARCH_ATTRIBUTES
                },
            )
        )
        yield env


@pytest.fixture
async def temporal(temporal_server: TemporalServer) -> Client:
    """A client of the dev server, which the whole suite shares."""
    return await Client.connect(temporal_server.address)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()
