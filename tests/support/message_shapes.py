"""The shape of every message as plain data: what a release writes and what it reads, without its
code.

A shape is JSON, so that the shapes of earlier releases can be kept as files. A reader rebuilt from
one (`reader`) follows msgspec's rules as that release did: unknown fields are ignored, missing
required ones and unknown values of an enum are refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shape_of

import workflows

#: What crosses a process boundary: Valkey, a worker's standard input, the paper exchange's wire.
STRUCT_MODULES = {
    "broker_reports": "worker_runtime.protocol.broker_reports",
    "exchange": "worker_runtime.brokers.paper.wire",
    "instruments": "worker_runtime.protocol.instruments",
    "jobs": "worker_runtime.jobs.protocol.messages",
    "launch": "worker_runtime.protocol.launch",
    "messages": "worker_runtime.protocol.messages",
    "requests": "worker_runtime.protocol.requests",
}
#: Structs that are in another module now: the name under which releases have recorded them.
_RECORDED_AS = {
    "exchange.ExchangeBalance": "exchange.Balance",
    "exchange.ExchangeOrderChanged": "exchange.OrderChanged",
    "exchange.ExchangePosition": "exchange.Position",
    "requests.UserSwitch": "switches.UserSwitch",
}

Shape = dict[str, Any]
#: JSON of plain types; Decimal and bytes travel as text.
_PLAIN: dict[str, tuple[type[Any], Any]] = {
    "StrType": (str, "text"),
    "IntType": (int, 7),
    "FloatType": (float, 1.5),
    "BoolType": (bool, True),
    "BytesType": (bytes, "AAEC"),
    "DecimalType": (Decimal, "12.5"),
    "DateType": (date, "2026-01-21"),
    "NoneType": (type(None), None),
    "AnyType": (Any, {"any": 1}),
    "RawType": (Any, {"raw": 1}),
}


def structs() -> dict[str, type[msgspec.Struct]]:
    """All structs of today's protocol, as `module.Name`."""
    structs_by_key = {}
    for path in STRUCT_MODULES.values():
        module = importlib.import_module(path)
        for kind, cls in inspect.getmembers(module, inspect.isclass):
            own = cls.__module__ == path and cls.__name__ == kind
            if own and issubclass(cls, msgspec.Struct):
                structs_by_key[key_of(cls)] = cls
    return structs_by_key


def dataclasses() -> dict[str, type[Any]]:
    """What crosses Temporal today, by name: all dataclasses of the workflows' files of messages."""
    classes_by_name = {}
    for path in sorted(Path(workflows.__path__[0]).glob("*/messages.py")):
        module = importlib.import_module(f"workflows.{path.parent.name}.messages")
        for kind, cls in inspect.getmembers(module, inspect.isclass):
            if is_dataclass(cls) and cls.__module__ == module.__name__:
                classes_by_name[kind] = cls
    return classes_by_name


def key_of(cls: type[Any]) -> str:
    [name] = (name for name, path in STRUCT_MODULES.items() if path == cls.__module__)
    key = f"{name}.{cls.__name__}"
    return _RECORDED_AS.get(key, key)


# --- shapes ---------------------------------------------------------------------------------------


def described(cls: type[msgspec.Struct]) -> Shape:
    """Tag and fields of a struct."""
    info = shape_of.type_info(cls)
    assert isinstance(info, shape_of.StructType)
    return {
        "tag_field": info.tag_field,
        "tag": info.tag,
        "fields": {
            field.encode_name: {"required": field.required, "type": _type(field.type)}
            for field in info.fields
        },
    }


def described_dataclass(cls: type[Any]) -> dict[str, bool]:
    """Field → whether a message must have it."""
    return {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(cls)
    }


def _type(info: Any) -> Shape:
    kind = type(info).__name__
    if kind in _PLAIN:
        return {"plain": kind} | _sample(info)
    if isinstance(info, shape_of.EnumType):
        return {"enum": [member.value for member in info.cls]}
    if isinstance(info, shape_of.StructType):
        return {"struct": key_of(info.cls)}
    if isinstance(info, shape_of.UnionType):
        return {"union": [_type(member_type) for member_type in info.types]}
    if isinstance(info, shape_of.DictType):
        return {"dict": _type(info.value_type)}
    if isinstance(info, (shape_of.ListType, shape_of.VarTupleType)):
        return {"list": _type(info.item_type)}
    raise TypeError(f"{info} is of a kind that no message had before: describe it here")


def _sample(info: Any) -> Shape:
    """A value within the type's bounds, where the usual one is not."""
    if (getattr(info, "ge", None) or 0) > 7:
        return {"sample": info.ge}
    pattern = getattr(info, "pattern", None)
    if pattern and not re.search(pattern, _PLAIN["StrType"][1]):  # an order's id
        return {"sample": "6a3f3c1e-0b0c-4f6e-9f5e-1d2c3b4a5968"}
    return {}


# --- samples --------------------------------------------------------------------------------------


def samples(key: str, known: dict[str, Shape]) -> Iterator[Any]:
    """Messages as JSON values: with all fields and each value of each enum, and the required
    only."""
    shape = known[key]
    tagged = {shape["tag_field"]: shape["tag"]} if shape["tag"] else {}
    every = {name: list(values(field["type"], known)) for name, field in shape["fields"].items()}
    for number in range(
        max((len(samples_of_field) for samples_of_field in every.values()), default=1)
    ):
        yield tagged | {
            name: samples_of_field[number % len(samples_of_field)]
            for name, samples_of_field in every.items()
        }
    yield tagged | {
        name: every[name][0] for name, field in shape["fields"].items() if field["required"]
    }


def values(shape: Shape, known: dict[str, Shape]) -> Iterator[Any]:
    if "plain" in shape:
        yield shape.get("sample", _PLAIN[shape["plain"]][1])
    elif "enum" in shape:
        yield from shape["enum"]
    elif "struct" in shape:
        yield from samples(shape["struct"], known)
    elif "union" in shape:
        for member_shape in shape["union"]:
            yield from values(member_shape, known)
    elif "dict" in shape:
        for value in values(shape["dict"], known):
            yield {"key": value}
    else:
        for value in values(shape["list"], known):
            yield [value]


# --- readers --------------------------------------------------------------------------------------


class Readers:
    """The readers of one release, rebuilt from its shapes."""

    def __init__(self, known: dict[str, Shape]) -> None:
        self._known = known
        self._made: dict[str, type[msgspec.Struct]] = {}

    def reader(self, key: str) -> type[msgspec.Struct]:
        if key not in self._made:
            shape = self._known[key]
            given: list[Any] = []
            for name, field in shape["fields"].items():
                # A default that no sample has: it is not compared.
                default = () if field["required"] else (msgspec.field(default=None),)
                annotation = self._annotation(field["type"])
                given.append(
                    (name, annotation if field["required"] else annotation | None, *default)
                )
            self._made[key] = msgspec.defstruct(
                key.partition(".")[2],
                given,
                tag_field=shape["tag_field"],
                tag=shape["tag"],
                kw_only=True,
            )
        return self._made[key]

    def _annotation(self, shape: Shape) -> Any:
        if "plain" in shape:
            return _PLAIN[shape["plain"]][0]
        if "enum" in shape:
            return Enum("Kept", [(str(value), value) for value in shape["enum"]])
        if "struct" in shape:
            return self.reader(shape["struct"])
        if "union" in shape:
            annotation = self._annotation(shape["union"][0])
            for member_shape in shape["union"][1:]:
                annotation = annotation | self._annotation(member_shape)
            return annotation
        if "dict" in shape:
            return dict[str, self._annotation(shape["dict"])]  # type: ignore[misc]
        return list[self._annotation(shape["list"])]  # type: ignore[misc]
