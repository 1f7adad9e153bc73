from __future__ import annotations

from typing import Any

import pytest

from tests.support.systems.compose_file import load_compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load_compose()
