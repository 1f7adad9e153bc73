"""Checks of a job's arguments against a schema that somebody else has written, within a bounded
time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from infra.jobs.arguments import (
    MAX_ERRORS,
    ArgumentsValidator,
    SchemaRefused,
    check_schema,
    levels_of,
)


def errors(schema: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    return [error["msg"] for error in ArgumentsValidator(schema).errors(arguments)]


def of(schema: Any) -> dict[str, Any]:
    """Returns the schema of an object with one argument `a`."""
    return {"type": "object", "properties": {"a": schema}}


def nested(levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for _ in range(levels):
        part = {"not": part}
    return part


class Address(msgspec.Struct, forbid_unknown_fields=True):
    city: str
    lines: list[str] = []


class Parcel(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    to: Address | None = None
    parts: list[Parcel] = []


def test_schemas_of_msgspec_are_taken_with_their_recursion() -> None:
    schema = msgspec.json.schema(Parcel)
    part = {"number": 2, "to": {"city": "Taipei"}}
    assert errors(schema, {"number": 1, "parts": [part]}) == []
    assert errors(schema, {"number": 1, "parts": [{"to": None}]}) == [
        "An argument is missing: number."
    ]
    assert errors(schema, {"number": 1, "to": {"city": 3}}) == [
        "It fits none of the forms that this type takes."
    ]


@pytest.mark.parametrize(
    "schema",
    [
        of({"$ref": "https://example.com/schema.json"}),
        of({"$ref": "file:///etc/passwd"}),
        of({"$ref": "#/properties/a"}),
        of({"$ref": "#/$defs/none"}),
        of({"$dynamicRef": "#a"}),
        of({"patternProperties": {"^a": {}}}),
        of({"unevaluatedProperties": False}),
        of({"dependentSchemas": {"a": {}}}),
        of("text"),
        of({"type": "no-such-type"}),
        {"$id": "https://example.com", "type": "object"},
        {"type": "array"},
        of(nested(200)),
        of(nested(900)),
    ],
)
def test_a_schema_with_parts_that_reach_out_or_have_no_bound_is_refused(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(SchemaRefused) as caught:
        check_schema(schema)
    assert caught.value.detail.endswith((".", "'")) or "not a JSON Schema" in caught.value.detail


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (of({"pattern": r"^(a+)+$"}), {"a": "a" * 60_000 + "b"}),
        (of({"pattern": r"^(a|a)*b$"}), {"a": "a" * 60_000}),
        (of({"pattern": r"(x+x+)+y"}), {"a": "x" * 60_000}),
        (of({"pattern": r"^(([a-z]){1,999}){1,999}$"}), {"a": "a" * 60_000}),
        (of({"pattern": r"(?=a)a"}), {"a": "b"}),
        (of({"uniqueItems": True}), {"a": [[number] for number in range(12_000)]}),
        (of({"items": {"enum": list(range(3000))}}), {"a": [-1] * 5000}),
    ],
)
def test_no_pair_of_schema_and_arguments_takes_long(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    validator = ArgumentsValidator(schema)
    began = time.process_time()
    validator.errors(arguments)
    assert time.process_time() - began < 2.0


def test_a_schema_that_doubles_the_work_with_each_level_is_cut_off() -> None:
    both = [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "minProperties": least}
        for least in (2, 3)
    ]
    schema = {**of({"$ref": "#/$defs/N"}), "$defs": {"N": {"anyOf": both}}}
    arguments: dict[str, Any] = {}
    for _ in range(30):
        arguments = {"a": arguments}
    began = time.process_time()
    assert errors(schema, arguments) == [
        "These arguments take too long to check against the schema of this type."
    ]
    assert time.process_time() - began < 5.0


def test_patterns_are_those_of_python_and_are_searched_as_json_schema_says() -> None:
    assert errors(of({"pattern": r"^\d{4}\Z"}), {"a": "2026"}) == []
    assert errors(of({"pattern": r"^\d{4}\Z"}), {"a": "20267"}) != []
    assert errors(of({"pattern": "b"}), {"a": "abc"}) == []
    # The runner checks what this engine cannot.
    assert errors(of({"pattern": r"(?!b)a"}), {"a": "zzz"}) == []


def test_no_sentence_shows_a_value_and_there_are_not_too_many() -> None:
    schema = of({"items": {"type": "integer"}})
    errors = ArgumentsValidator(schema).errors({"a": ["secret"] * 100})
    assert len(errors) == MAX_ERRORS
    assert errors[0] == {
        "loc": ["args", "a", 0],
        "msg": "It has to be of the type integer.",
        "type": "type",
    }
    assert "secret" not in str(errors)


def test_levels_are_counted_only_as_far_as_needed() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    assert levels_of(deep) == 33
    assert levels_of({"a": [1]}) == 3
