"""The client's types are those of the API's OpenAPI document: fields, which are required, and their
types."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.app import create_app
from infra.client import errors, models
from infra.settings import Settings

#: Our type → the API's schema.
SCHEMAS: dict[type[msgspec.Struct], str] = {
    models.OrderTicket: "OrderRequest",
    models.CancelTicket: "CancelRequest",
    models.ReplaceTicket: "ReplaceRequest",
    models.OrderSnapshot: "OrderView",
    models.OrderHistoryStep: "OrderStepView",
    models.OrderHistory: "OrderDetailView",
    models.OrderListPage: "OrderPage",
    models.OpenOrders: "PresentOrders",
    models.CreatedUser: "UserWithKeyView",
    models.KeySnapshot: "ApiKeyView",
    models.KeyPage: "ApiKeyList",
    models.CreatedKey: "NewApiKeyView",
    models.BrokerCredentials: "CredentialsRequest",
    models.CredentialsReceipt: "CredentialsView",
    models.InstrumentPriceStep: "PriceStepView",
    models.ListedInstrument: "InstrumentView",
    models.InstrumentListPage: "InstrumentPageView",
    models.HeldPosition: "PositionView",
    models.AccountPositions: "PositionList",
    models.AccountBalance: "BalanceView",
    models.MarkSnapshot: "MarkView",
    models.LifecycleSnapshot: "LifecycleView",
    models.WorkerSnapshot: "WorkerView",
    models.StartedWorker: "StartedWorkerView",
    models.StateTransition: "TransitionView",
    models.PresentWorkerState: "PresentState",
}
#: Ids that the client makes when nobody gives one.
MADE = {"client_order_id", "request_id"}


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    document = create_app(Settings(data_dir=Path("unused"))).openapi()
    api_schemas: dict[str, Any] = document["components"]["schemas"]
    return api_schemas


def shape(schema: dict[str, Any], named: dict[str, Any], *, ours: bool) -> Any:
    """Returns a type in a form that both descriptions have: without limits, formats of text,
    descriptions, order."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        target = named[name]
        if "properties" in target:
            if not ours:
                return name
            return SCHEMAS[next(kind for kind in SCHEMAS if kind.__name__ == name)]
        return shape(target, named, ours=ours)
    if "anyOf" in schema:
        kinds = {shape(option, named, ours=ours) for option in schema["anyOf"]}
        # A price may come as a number.
        return frozenset(kinds - {"number"} if "string" in kinds else kinds)
    if "enum" in schema:
        return frozenset(schema["enum"])
    if schema["type"] == "array":
        return ("array", shape(schema["items"], named, ours=ours))
    if isinstance(extra := schema.get("additionalProperties"), dict):
        return ("object", shape(extra, named, ours=ours))
    return (schema["type"], "date-time") if schema.get("format") == "date-time" else schema["type"]


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_a_type_is_the_schema_of_the_api(
    kind: type[msgspec.Struct], schemas: dict[str, Any]
) -> None:
    _, defined = msgspec.json.schema_components([kind], ref_template="#/{name}")
    own, theirs = defined[kind.__name__], schemas[SCHEMAS[kind]]
    assert set(own["properties"]) == set(theirs["properties"])
    assert set(own.get("required", ())) | (MADE & set(own["properties"])) == set(theirs["required"])
    for name, schema in own["properties"].items():
        expected = shape(theirs["properties"][name], schemas, ours=False)
        if (kind, name) == (models.BrokerCredentials, "broker"):
            # The document lists the brokers that are installed there, which the client cannot know.
            assert expected >= {"paper", "shioaji"}
            expected = "string"
        assert shape(schema, defined, ours=True) == expected, name


def test_the_client_imports_httpx_and_msgspec_and_nothing_else() -> None:
    imported: set[str] = set()
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"httpx", "msgspec"}


def test_every_type_is_compared() -> None:
    structs = {
        kind
        for _, kind in inspect.getmembers(models, inspect.isclass)
        if issubclass(kind, msgspec.Struct)
    } - {msgspec.Struct}
    assert structs == set(SCHEMAS)


def test_the_members_of_a_problem_are_those_of_the_api(schemas: dict[str, Any]) -> None:
    """`status` is the answer's own; the rest says nothing that a program would act on."""
    known = {field.encode_name for field in msgspec.structs.fields(errors.ProblemDetails)}
    assert known == set(schemas["Problem"]["properties"]) - {"type", "status", "instance", "legs"}
