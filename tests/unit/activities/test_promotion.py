"""The newer one of two versions is promoted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from activities.orchestrator.deployment import DeploymentSnapshot
from activities.orchestrator.promotion import is_newer

FIRST = datetime(2026, 11, 21, tzinfo=UTC)
LATER = FIRST + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("own", "own_since", "current", "current_since", "expected"),
    [
        ("0.2.0-aa", FIRST, "0.1.0-bb", LATER, True),
        ("0.1.0-aa", LATER, "0.2.0-bb", FIRST, False),
        ("0.10.0-aa", FIRST, "0.9.0-bb", LATER, True),
        ("0.1.0-aa", LATER, "0.1.0-bb", FIRST, True),
        ("0.1.0-aa", FIRST, "0.1.0-bb", LATER, False),
        ("mine", LATER, "0.1.0-bb", FIRST, True),
        ("mine", FIRST, "yours", LATER, False),
    ],
)
def test_the_release_decides_and_then_who_came_first(
    own: str, own_since: datetime, current: str, current_since: datetime, expected: bool
) -> None:
    seen = DeploymentSnapshot(
        current=current, versions={own: own_since, current: current_since}, token=b""
    )
    assert is_newer(seen, own) is expected


def test_any_version_is_newer_than_none() -> None:
    assert is_newer(DeploymentSnapshot(current="", versions={"a": FIRST}, token=b""), "a")
