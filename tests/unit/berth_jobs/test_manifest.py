"""What a manifest says of a package's job types, and what it may not hold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from infra.berth_jobs import job
from infra.berth_jobs.manifest import (
    MAX_SCHEMA_LEVELS,
    BadManifest,
    build_manifest,
    read_manifest,
)


@job(name="manifest.split")
def split(text: str, separator: Literal["\0", ","] = ",") -> None:
    """Splits a text."""


@job(name="manifest.join")
def join(parts: list[str]) -> None:
    """Joins texts at \0."""


def a_manifest(schema: dict[str, Any]) -> bytes:
    kind = {"name": "shop/jobs.resize", "arguments_schema": schema}
    return msgspec.json.encode({"application": "shop", "package": "shop", "types": [kind]})


def nested(levels: int) -> dict[str, Any]:
    """Returns a schema that is nested this deep."""
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("function", [split, join])
def test_a_text_that_postgresql_cannot_store_is_refused_where_the_types_are_described(
    function: Any,
) -> None:
    with pytest.raises(BadManifest, match=r"shop/manifest\.\w+: a text holds the character NUL"):
        build_manifest("shop", [function], "shop")


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    assert read_manifest(a_manifest(nested(MAX_SCHEMA_LEVELS)))
    for levels in (MAX_SCHEMA_LEVELS + 1, 300, 100_000):
        with pytest.raises(BadManifest, match=r"nested more than 32 levels|does not fit"):
            read_manifest(a_manifest(nested(levels)) if levels < 500 else deep_text(levels))


def deep_text(levels: int) -> bytes:
    text = '{"not":' * levels + "{}" + "}" * levels
    return a_manifest({}).replace(b'"arguments_schema":{}', f'"arguments_schema":{text}'.encode())
