"""Makes both producers before an API that answers by script."""

from __future__ import annotations

import pytest

from tests.support.clients.scripted_api import ScriptedProducerApi


@pytest.fixture(params=[False, True], ids=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest) -> ScriptedProducerApi:
    return ScriptedProducerApi(request.param)
