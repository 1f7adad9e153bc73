"""Validates the arguments of an application's job
against the JSON Schema that its runner has announced.

The schema comes from an application's runner and the arguments from a client, so neither may cost
the API more than a bounded time. `check_schema` admits the keywords that msgspec and pydantic
write, with references inside the schema only: nothing is ever fetched. Each step of a validation
counts, and patterns run on a regular expression engine with linear time. What it cannot bound it
leaves to the runner, which validates again.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema

from worker_runtime.protocol.errors import BerthError

# jsonschema's checks of formats, which nothing here uses, would build a parser of addresses where
# this package is installed, as it is for tests: 1.1 s of CPU at the start of each API process.
_absent = sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
from jsonschema import Draft202012Validator  # noqa: E402
from jsonschema.exceptions import SchemaError, ValidationError  # noqa: E402
from jsonschema.validators import extend  # noqa: E402

if _absent is None:
    del sys.modules["rfc3987_syntax"]

#: Steps of one validation; one takes about 10 µs.
MAX_STEPS = 40_000
#: Errors that are reported.
MAX_ERRORS = 20
#: Size of a pattern, with its repetitions, that the API checks:
#: matching 64 KiB with it takes milliseconds.
MAX_PATTERN_SIZE = 20_000
#: Levels of nesting in arguments.
MAX_LEVELS = 32

_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"properties", "$defs", "definitions"})
_SCHEMAS = frozenset(
    {"additionalProperties", "propertyNames", "items", "contains", "not", "if", "then", "else"}
)
_VALUES = frozenset(
    {
        "$schema", "$comment", "title", "description", "default", "examples", "deprecated",
        "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType", "discriminator",
        "type", "enum", "const", "required", "dependentRequired", "minProperties", "maxProperties",
        "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minLength",
        "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf",
    }
)  # fmt: skip
_REFERENCE = re.compile(r"#(/(\$defs|definitions)/[^/~%]+)?\Z")
_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")

_steps_left: ContextVar[int] = ContextVar("steps_left")


class SchemaRefused(BerthError, code="JOB_SCHEMA_REFUSED", status=422):
    """The JSON Schema of a job type has a part that the API does not support."""


class _TooManySteps(Exception):
    """The validation takes longer than it may."""


def check_schema(schema: dict[str, Any]) -> None:
    """Raise `SchemaRefused` with a sentence for a schema
    that `ArgumentsValidator` does not accept."""
    try:
        _check_whole(schema)
    except RecursionError:
        raise SchemaRefused("The schema is nested too deeply to be checked.") from None


def _check_whole(schema: dict[str, Any]) -> None:
    if schema.get("type", "object") != "object" and "$ref" not in schema:
        raise SchemaRefused("The arguments of a job are an object; the schema says something else.")
    references: set[str] = set()
    _check_part(schema, references)
    for reference in references - {"#"}:
        _, section, name = reference.split("/")
        if name not in schema.get(section, {}):
            raise SchemaRefused(f"The schema refers to {reference[:100]}, which is not in it.")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise SchemaRefused(f"This is not a JSON Schema: {error.message[:200]}") from None


def _check_part(part: Any, references: set[str]) -> None:
    if isinstance(part, bool):
        return
    if not isinstance(part, dict):
        raise SchemaRefused("A part of the schema is neither an object nor true or false.")
    for keyword, value in part.items():
        if keyword == "$ref":
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise SchemaRefused("A $ref in a job's schema is `#` or `#/$defs/<name>`.")
            references.add(value)
        elif keyword in _SCHEMAS:
            _check_part(value, references)
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            for child in value:
                _check_part(child, references)
        elif keyword in _SCHEMA_MAPS and isinstance(value, dict):
            for child in value.values():
                _check_part(child, references)
        elif keyword not in _VALUES:
            raise SchemaRefused(
                f"The keyword {keyword[:64]!r} is not supported in the schema of a job type."
            )


class ArgumentsValidator:
    """Validates arguments against one schema. May be used by several threads."""

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises `SchemaRefused`."""
        check_schema(schema)
        self._validator = _BoundedValidator(schema)

    def errors(self, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Return why the arguments do not fit, at most `MAX_ERRORS`:
        `loc`, `msg` and `type` of each.

        No message shows a value of the arguments,
        which may be secret. Takes at most about half a second.
        """
        token = _steps_left.set(MAX_STEPS)
        errors: list[dict[str, Any]] = []
        try:
            for error in self._validator.iter_errors(arguments):
                errors.append(_described(error))
                if len(errors) == MAX_ERRORS:
                    break
        except (_TooManySteps, RecursionError):
            message = "These arguments take too long to check against the schema of this type."
            errors.append({"loc": ["args"], "msg": message, "type": "too_expensive"})
        finally:
            _steps_left.reset(token)
        return errors


def _spend(steps: int) -> None:
    remaining = _steps_left.get() - steps
    if remaining < 0:
        raise _TooManySteps
    _steps_left.set(remaining)


Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


def _counted(check: Keyword) -> Keyword:
    def check_within_steps(
        validator: Any, value: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        _spend(1 + (_size(value) if value is schema.get("enum") else 0))
        yield from check(validator, value, instance, schema) or ()

    return check_within_steps


def _size(value: Any) -> int:
    """Return how many values an `enum` or `const` compares."""
    return sum(map(_size, value)) + 1 if isinstance(value, list) else 1


def _check_pattern(
    _validator: Any, pattern: Any, instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, str) or (matcher := _matcher(pattern)) is None:
        return
    _spend(len(instance) * _pattern_size(pattern) // MAX_PATTERN_SIZE)
    if not matcher.isinstance_python(instance):
        yield ValidationError("")


@lru_cache(maxsize=4096)
def _matcher(pattern: str) -> SchemaValidator | None:
    """Return a matcher in linear time;
    None for a pattern that needs more, which the runner checks."""
    if _pattern_size(pattern) > MAX_PATTERN_SIZE:
        return None
    # Python's end of the text has another name in this engine.
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\Z", r"\1\\z", pattern)
    try:
        return SchemaValidator(core_schema.str_schema(pattern=text, regex_engine="rust-regex"))
    except PatternError:
        return None


def _pattern_size(pattern: str) -> int:
    size = len(pattern)
    for low, high in _REPETITION.findall(pattern[: MAX_PATTERN_SIZE + 1]):
        size *= max(1, int((high or low)[:9]))
        if size > MAX_PATTERN_SIZE:
            break
    return size


def _check_unique(
    _validator: Any, is_unique: Any, instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if is_unique and isinstance(instance, list):
        _spend(len(instance))
        if len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
            yield ValidationError("")


_KEYWORDS: dict[str, Keyword] = {
    keyword: _counted(check) for keyword, check in Draft202012Validator.VALIDATORS.items()
}
_KEYWORDS |= {"pattern": _check_pattern, "uniqueItems": _check_unique}
_BoundedValidator: Any = extend(Draft202012Validator, _KEYWORDS)

_SENTENCES: dict[str, str] = {
    "minLength": "It is shorter than {} characters.",
    "maxLength": "It is longer than {} characters.",
    "minimum": "It is less than {}.",
    "maximum": "It is more than {}.",
    "exclusiveMinimum": "It has to be more than {}.",
    "exclusiveMaximum": "It has to be less than {}.",
    "multipleOf": "It is not a multiple of {}.",
    "minItems": "It has fewer than {} items.",
    "maxItems": "It has more than {} items.",
    "minProperties": "It has fewer than {} fields.",
    "maxProperties": "It has more than {} fields.",
    "pattern": "It does not match the pattern {}.",
    "const": "It has to be {}.",
    "enum": "It has to be one of {}.",
    "type": "It has to be of the type {}.",
    "required": "An argument is missing: {}.",
    "additionalProperties": "It has an argument that this type does not take: {}.",
    "uniqueItems": "Its items have to differ.",
    "anyOf": "It fits none of the forms that this type takes.",
    "oneOf": "It does not fit exactly one of the forms that this type takes.",
}


def _described(error: ValidationError) -> dict[str, Any]:
    keyword, value = str(error.validator), error.validator_value
    if keyword == "required":
        value = ", ".join(name for name in value if name not in error.instance)
    elif keyword == "additionalProperties":
        known = error.schema.get("properties", {})
        value = ", ".join(sorted(name[:64] for name in error.instance if name not in known)[:10])
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False)
    sentence = _SENTENCES.get(
        keyword, "It does not fit the rule `" + keyword + "` of the type's schema."
    )
    path = ["args", *error.absolute_path]
    return {"loc": path, "msg": sentence.format(str(value)[:200]), "type": keyword}


def levels_of(value: Any, max_levels: int = MAX_LEVELS) -> int:
    """Return how deep a JSON value is nested, counted only as far as `max_levels` + 1."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        part, level = todo.pop()
        if level > max_levels:
            return level
        deepest = max(deepest, level)
        if isinstance(part, dict):
            todo += [(child, level + 1) for child in part.values()]
        elif isinstance(part, list):
            todo += [(child, level + 1) for child in part]
    return deepest
