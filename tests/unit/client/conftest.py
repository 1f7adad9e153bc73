"""Makes both clients before an API that answers by script."""

from __future__ import annotations

import pytest

from tests.support.clients.scripted_transport import ScriptedTransport


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> ScriptedTransport:
    return ScriptedTransport(request.param)
