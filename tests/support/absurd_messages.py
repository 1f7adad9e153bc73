"""Messages that are well typed and make no sense: what a hostile worker may send under its own
keys.

Each field is plausible three times out of four, so that most messages get past the first check.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as shape_of

from worker_runtime.protocol import bounds
from worker_runtime.protocol.requests import AccountReport


def around(bound: int) -> tuple[int, int, int]:
    """Returns a bound and its neighbours."""
    return bound - 1, bound, bound + 1


NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    64,
    2**31 - 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**18,
    10**30,
]
NUMBERS += [
    *around(bounds.EARLIEST_MS),
    *around(bounds.LATEST_MS),
    *around(1000),
    *around(100_000_000),
]
NUMBERS += [*around(3_600_000_000), *around(100 * 366 * 86_400_000), -100_000_001, -(10**18)]
#: Characters that the fields of messages may have at most (worker_runtime/protocol/bounds.py).
LENGTHS = (36, 64, 128, 160, 512, 16_000)
TEXTS = [
    "",
    "\x00",
    "a\x00b",
    *("x" * length for bound in LENGTHS for length in around(bound)),
    "x" * 20_000,
    "'; --",
    "%s{}\\",
    "\U0001f4a5" * 40,
    "\ufffe",
]
TEXTS += ["00000000-0000-4000-8000-000000000000", "no uuid", "-1", "NaN", "../..", "{u}", "a b"]
PRICES = [
    "0",
    "-0",
    "-1",
    "NaN",
    "sNaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "1e-400",
    "9" * 60,
    "0." + "3" * 60,
]
PRICES += ["612.5", "1E+11", "999999999999.999999", "999999999999.9999999", "0.0000001"]
# Each bound of a number with its neighbours, and what is short as it arrives and long when it is
# written.
PRICES += [
    f"1E{exponent}"
    for bound in (bounds.MIN_EXPONENT, bounds.MAX_EXPONENT)
    for exponent in around(bound)
]
PRICES += ["1." + "1" * digits for digits in around(bounds.MAX_DIGITS - 1)]
PRICES += [
    "1E-999999",
    "1E+999999",
    "0E-999999",
    "0E+999999",
    "1E-999999999999999999",
    "-1E-999999",
]
FLOATS = [0.0, -1.0, 1e300, -1e300, 5e-324, 1e18]

DATES = ["2026-01-21", "0001-01-01", "9999-12-31", "2026-02-30", "tomorrow", ""]

#: Field → plausible values.
Known = Mapping[str, list[Any]]


def messages(kind: Any, known: Known) -> st.SearchStrategy[Any]:
    """JSON values of a struct, or of a union of structs."""
    return _value(shape_of.type_info(kind), known, "")


def _value(info: Any, known: Known, name: str) -> st.SearchStrategy[Any]:
    absurd = _absurd(info, known, name)
    plausible = known.get(name)
    if plausible is None:
        return absurd
    good = st.sampled_from(plausible)
    return st.one_of(good, good, good, absurd)


def _absurd(info: Any, known: Known, name: str) -> st.SearchStrategy[Any]:
    if isinstance(info, shape_of.StructType):
        return _struct(info, known)
    if isinstance(info, shape_of.UnionType):
        return st.one_of(*(_absurd(union_type, known, name) for union_type in info.types))
    if isinstance(info, shape_of.EnumType):
        return st.sampled_from([member.value for member in info.cls])
    if isinstance(info, shape_of.ListType | shape_of.VarTupleType):
        return st.lists(_value(info.item_type, known, ""), max_size=3)
    if isinstance(info, shape_of.DictType):  # the only one: an account's report
        junk = st.dictionaries(
            st.sampled_from(TEXTS[:8]), st.sampled_from([*NUMBERS, *TEXTS]), max_size=3
        )
        return st.one_of(messages(AccountReport, known), messages(AccountReport, known), junk)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        shape_of.IntType: st.sampled_from(NUMBERS) | st.integers(0, 5),
        shape_of.StrType: st.sampled_from(TEXTS) | st.text(max_size=8),
        shape_of.BoolType: st.booleans(),
        shape_of.FloatType: st.sampled_from(FLOATS),
        shape_of.DecimalType: st.sampled_from(PRICES),
        shape_of.DateType: st.sampled_from(DATES),
        shape_of.NoneType: st.none(),
        shape_of.BytesType: st.binary(max_size=40).map(
            lambda data: base64.b64encode(data).decode()
        ),
        shape_of.AnyType: st.sampled_from([None, 1, "x", [], {}]),
    }
    return plain[type(info)]


def _struct(info: shape_of.StructType, known: Known) -> st.SearchStrategy[Any]:
    required: dict[Any, st.SearchStrategy[Any]] = {}
    optional: dict[Any, st.SearchStrategy[Any]] = {}
    for field in info.fields:
        where = required if field.required else optional
        where[field.encode_name] = _value(field.type, known, field.encode_name)
    tag = {info.tag_field: info.tag} if info.tag_field else {}
    return st.fixed_dictionaries(required, optional=optional).map(lambda made: tag | made)


def plausible(**values: list[Any]) -> Known:
    """What most messages have, so that they get far."""
    now = time.time_ns() // 1_000_000
    return {
        **{
            name: [now, now - 1000]
            for name in ("at_ms", "taken_at_ms", "claimed_at_ms", "connected_at_ms")
        },
        **{
            name: [1, 2, 3]
            for name in ("quantity", "filled_quantity", "epoch", "attempt", "sequence", "v")
        },
        **{name: ["612.5", "0.01"] for name in ("price", "average_price", "cash", "available")},
        **{name: ["2330", "TXFR1"] for name in ("symbol",)},
        # Of the list of a broker's instruments and the requests for it.
        **{name: ["", "2330"] for name in ("after", "next_after", "underlying")},
        **{name: [1, 200] for name in ("limit", "lot_units", "total")},
        **{name: ["1", "0.05", "1000"] for name in ("tick", "below", "lot_value")},
        "market": ["stock", ""],
        "v": [1],
        "behind_ms": [0],
        "account_id": ["main"],
        "reason": ["why", None],
        **values,
    }


def encoded(message: Any) -> bytes:
    return msgspec.json.encode(message)
