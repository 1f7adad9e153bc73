"""What a direct producer sends for a call: the same as without its short cuts."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from infra.berth_jobs import job
from infra.berth_jobs.api_calls import EnqueueOptions
from infra.berth_jobs.declaration import JobFunction
from infra.berth_jobs.direct import _JobTemplate, _Signer
from infra.berth_jobs.manifest import describe_type
from infra.berth_jobs.options import fields_depend_on_arguments, job_fields
from infra.jobs.arguments import ArgumentsValidator
from worker_runtime.protocol.authentication import MessageKey, sign_payload


@job(name="jobs.mixed")
def mixed(first: int, second: str = "b", *, third: float, fourth: bool = False) -> None:
    """Has parameters of all kinds."""


@job(name="jobs.grouped", group="of-{first}")
def grouped(first: int) -> None:
    """Its group depends on its arguments."""


@job(name="jobs.unique", unique_for=60)
def unique(first: int) -> None:
    """Its unique key depends on its arguments."""


class DefaultSize(BaseModel):
    width: int = 7


@job(name="jobs.defaults", group="shop-{shop}-{size}", unique_for=60)
def defaults(
    number: int,
    shop: str = "x",
    size: DefaultSize = DefaultSize(),  # noqa: B008 - a job may have it
    tags: list[str] = ["a"],  # noqa: B006
    separator: str = "\0",
) -> None:
    """Its group and unique key depend on arguments that may be left out."""


@job(name="jobs.fixed", group="all")
def fixed(first: int) -> None:
    """Its group is the same for all arguments."""


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {"third": 2.0}),
        ((1, "c"), {"fourth": True, "third": 2.0}),
        ((), {"third": 2.0, "second": "d", "first": 1}),
    ],
)
def test_arguments_are_bound_as_python_binds_them(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    bound = inspect.signature(mixed.type.function).bind(*args, **kwargs)
    assert mixed.type.encode_arguments(*args, **kwargs) == msgspec.json.encode(bound.arguments)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, "c", 3.0), {}),
        ((1,), {"first": 2, "third": 1.0}),
        ((1,), {}),
        ((1,), {"third": 1.0, "fifth": 1}),
    ],
)
def test_a_call_that_does_not_fit_is_refused_in_pythons_words(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError) as expected:
        inspect.signature(mixed.type.function).bind(*args, **kwargs)
    with pytest.raises(TypeError) as raised:
        mixed.type.encode_arguments(*args, **kwargs)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("job_id", ["a" * 32, 'quoted"\\'])
def test_a_template_gives_the_json_of_all_fields(job_id: str) -> None:
    fields = job_fields(describe_type("shop", fixed.type), b'{"first":1}')
    whole = {"type": "job", "v": 1, "job_id": job_id, **fields}
    encoded = _JobTemplate.of(fields).encode(job_id, b'{"first":1}')
    assert encoded == msgspec.json.encode(whole)


@pytest.mark.parametrize(
    ("function", "options", "depends"),
    [
        (fixed, EnqueueOptions(), False),
        (grouped, EnqueueOptions(), True),
        (grouped, EnqueueOptions(group="{first}"), False),  # a call's own group is no template
        (unique, EnqueueOptions(), True),
        (unique, EnqueueOptions(unique="mine"), False),
    ],
)
def test_fields_that_depend_on_arguments_are_known(
    function: JobFunction[..., Any], options: EnqueueOptions, depends: bool
) -> None:
    kind = describe_type("shop", function.type)
    first, second = (
        {**job_fields(kind, arguments, options), "args": None}
        for arguments in (b'{"first":1}', b'{"first":2}')
    )
    assert fields_depend_on_arguments(kind, options) == depends
    assert depends or first == second


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, "x"), {}),
        ((1,), {"size": DefaultSize()}),
        ((1,), {"tags": ["a"]}),
        ((1, "x"), {"size": DefaultSize(width=7), "tags": ["a"]}),
    ],
)
def test_a_default_that_is_given_or_left_out_is_the_same_group_and_the_same_job(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    kind = describe_type("shop", defaults.type)
    left_out = job_fields(kind, defaults.type.encode_arguments(1))
    given = job_fields(kind, defaults.type.encode_arguments(*args, **kwargs))
    assert (given["group"], given["unique"]) == (left_out["group"], left_out["unique"])
    assert bytes(left_out["args"]) == b'{"number":1}'  # nothing is sent that was left out
    other = job_fields(kind, defaults.type.encode_arguments(1, "y"))
    assert other["group"] != left_out["group"]
    assert other["unique"] != left_out["unique"]


def test_a_manifest_names_only_the_defaults_that_make_keys() -> None:
    assert "default" not in repr(describe_type("shop", mixed.type).arguments_schema)
    properties = describe_type("shop", defaults.type).arguments_schema["properties"]
    named = {name: about["default"] for name, about in properties.items() if "default" in about}
    assert named == {"shop": "x", "size": {"width": 7}, "tags": ["a"]}
    ArgumentsValidator(describe_type("shop", defaults.type).arguments_schema)


def test_a_manifest_of_a_release_without_defaults_makes_keys_of_what_is_given() -> None:
    kind = describe_type("shop", defaults.type)
    before = msgspec.structs.replace(kind, arguments_schema={"type": "object"})
    assert job_fields(before, b'{"number":1}')["group"] == "shop-null-null"


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_is_signed_as_servers_sign(count: int) -> None:
    keys = [MessageKey(version, bytes([version]) * 32) for version in (2, 1)][:count]
    signer = _Signer([(str(key.version).encode(), key.key) for key in keys])
    for body in (b"{}", b"x" * 5000):
        assert signer.sign(body) == sign_payload(keys, b"job/1", body)
