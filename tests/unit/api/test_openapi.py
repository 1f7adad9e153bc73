"""The description is valid, and no operation keeps quiet about how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from api.app import create_app
from api.http.fields import EXAMPLES
from api.http.rights import RIGHTS, Role
from infra.settings import Settings

PUBLIC = {
    "/v1/healthz",
    "/v1/readyz",
    "/v1/webhooks/{token}/orders",
    "/v1/webhooks/{token}/signals",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings(data_dir=Path("unused"))).openapi()


def operations(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    ]


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    # Here, since it builds 38 grammars when it is imported: 2 s, which each process of the suite
    # would pay.
    from openapi_spec_validator import validate

    validate(document)
    assert {path for path, _ in operations(document)} == {
        "/v1/users",
        "/v1/audit",
        "/v1/api-keys",
        "/v1/api-keys/self",
        "/v1/api-keys/self/rotate",
        "/v1/api-keys/{key_id}",
        "/v1/api-keys/{key_id}/rotate",
        "/v1/images",
        "/v1/users/{user_id}",
        "/v1/users/{user_id}/disable",
        "/v1/users/{user_id}/enable",
        "/v1/users/{user_id}/accounts/{account_id}",
        "/v1/users/{user_id}/accounts/{account_id}/credentials",
        "/v1/users/{user_id}/accounts/{account_id}/retry",
        "/v1/users/{user_id}/accounts/{account_id}/limits",
        "/v1/users/{user_id}/accounts/{account_id}/positions",
        "/v1/users/{user_id}/accounts/{account_id}/balance",
        "/v1/users/{user_id}/accounts/{account_id}/positions/{symbol}/close",
        "/v1/users/{user_id}/accounts/{account_id}/intents",
        "/v1/users/{user_id}/orders",
        "/v1/users/{user_id}/orders.csv",
        "/v1/users/{user_id}/orders/events",
        "/v1/orders",
        "/v1/orders/{order_id}",
        "/v1/orders/{order_id}/cancel",
        "/v1/orders/{order_id}/replace",
        "/v1/orders/{order_id}/recheck",
        "/v1/orders/{order_id}/resolve",
        "/v1/attention",
        "/v1/users/{user_id}/reconciliations",
        "/v1/reconciliations",
        "/v1/reconciliations/{number}/resolve",
        "/v1/certificates",
        "/v1/person-matches",
        "/v1/person-matches/{number}/resolve",
        "/v1/switches",
        "/v1/users/{user_id}/webhooks",
        "/v1/users/{user_id}/webhooks/{webhook_id}",
        "/v1/users/{user_id}/webhooks/{webhook_id}/pause",
        "/v1/users/{user_id}/webhooks/{webhook_id}/resume",
        "/v1/users/{user_id}/webhooks/{webhook_id}/rotate",
        "/v1/users/{user_id}/webhooks/{webhook_id}/test",
        "/v1/users/{user_id}/webhooks/{webhook_id}/calls",
        "/v1/users/{user_id}/webhooks/{webhook_id}/calls.csv",
        "/v1/symbols",
        "/v1/symbols/{name}",
        "/v1/instruments",
        "/v1/instruments/sources",
        "/v1/instruments/sources/{broker}",
        "/v1/instruments/sources/{broker}/load",
        "/v1/instruments/changes",
        "/v1/instruments/changes/{number}/approve",
        "/v1/instruments/{broker}/{code}",
        "/v1/pools/{pool}",
        "/v1/pools/{pool}/pause",
        "/v1/pools/{pool}/drain",
        "/v1/pools/{pool}/resume",
        "/v1/pools/{pool}/rollout",
        "/v1/pools/{pool}/rollout/abort",
        "/v1/metrics",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/cancel",
        "/v1/job-applications",
        "/v1/job-types",
        "/v1/job-queues",
        "/v1/job-queues/{queue}",
        "/v1/job-types/{application}/{name}",
        "/v1/job-limits/{application}/{name}",
        "/v1/jobs/batch",
        "/v1/job-limits",
        "/v1/job-limits/{job_type}",
        "/v1/users/{user_id}/statement-addresses",
        "/v1/users/{user_id}/jobs",
        "/v1/users/{user_id}/jobs/{job_id}",
        "/v1/users/{user_id}/jobs/{job_id}/cancel",
        "/v1/users/{user_id}/jobs/{job_id}/file",
        "/v1/workers",
        "/v1/fleet",
        "/v1/fleet/primary",
        "/v1/fleet/servers",
        "/v1/dead-letters",
        "/v1/dead-letters/{letter_id}",
        "/v1/reports/daily",
        "/v1/users/{user_id}/statistics",
        "/v1/dead-letters/{letter_id}/{act}",
        "/v1/fleet/maintenance",
        "/v1/users/{user_id}/worker",
        "/v1/users/{user_id}/worker/timeline",
        "/v1/users/{user_id}/worker/events",
        "/v1/users/{user_id}/worker/start",
        "/v1/users/{user_id}/worker/stop",
        "/v1/users/{user_id}/worker/resume",
        "/v1/users/{user_id}/worker/reload-credentials",
        *PUBLIC,
    }


def test_every_operation_behind_a_key_says_so_and_documents_its_problems(
    document: dict[str, Any],
) -> None:
    for path, operation in operations(document):
        if path in PUBLIC:
            assert "security" not in operation
            continue
        assert operation["security"] == [{"ApiKey": []}], path
        method = next(
            name for name, candidate in document["paths"][path].items() if candidate is operation
        )
        assert f"{method.upper()} {path.removeprefix('/v1')}" in RIGHTS
        assert "403" in operation["responses"], path  # a key may be bound to addresses
        assert {"401", "422", "500", "503"} <= set(operation["responses"]), path
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                examples = response["content"]["application/problem+json"]["examples"]
                assert examples, (path, status)
                assert all(
                    example["value"]["status"] == int(status) for example in examples.values()
                )


def test_every_body_and_every_answer_has_an_example(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in (
        "UserRequest",
        "ApiKeyRequest",
        "ApiKeyList",
        "NewApiKeyView",
        "ImageRequest",
        "ImageList",
        "CredentialsRequest",
        "OrderRequest",
        "OrderView",
        "OrderDetailView",
        "OrderPage",
        "CancelRequest",
        "ClosePositionRequest",
        "IntentRequest",
        "IntentView",
        "PositionList",
        "BalanceView",
        "ReplaceRequest",
        "AttentionPage",
        "ReconciliationList",
        "PersonMatchList",
        "ResolveOrderRequest",
        "UserJobRequest",
        "FleetJobRequest",
        "JobStateView",
        "WorkerView",
        "FleetPage",
        "RolloutRequest",
        "RolloutStatusView",
        "MaintenanceRunView",
        "TimelineView",
        "SwitchRequest",
        "AccountLimitsRequest",
        "AccountLimitsView",
        "WebhookRequest",
        "WebhookWithSecretsView",
        "WebhookList",
        "Signal",
        "SwitchList",
    ):
        assert schemas[name]["examples"], name


def test_the_key_comes_in_a_header(document: dict[str, Any]) -> None:
    scheme = document["components"]["securitySchemes"]["ApiKey"]
    assert (scheme["type"], scheme["in"], scheme["name"]) == ("apiKey", "header", "X-API-Key")


def test_what_a_user_asks_of_a_user_may_not_be_theirs(document: dict[str, Any]) -> None:
    """The answer is 404, for a query as for a path, whether the other user exists or not."""
    for route, right in RIGHTS.items():
        method, _, path = route.partition(" ")
        operation = document["paths"].get(f"/v1{path}", {}).get(method.lower(), {})
        names = {parameter["name"] for parameter in operation.get("parameters", ())}
        if "user_id" in names and Role.USER in right.roles:
            assert "404" in operation["responses"], route


def test_no_default_validation_error_is_left(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in document["components"]["schemas"]


def models(base: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from models(model)


# An alert's example is what one types into TradingView, which fills it in.
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"Signal"}))
def test_each_example_is_one_of_a_model_of_this_name(name: str) -> None:
    (model,) = {
        candidate
        for candidate in models()
        if candidate.__name__ == name and candidate.__module__.startswith("api.")
    }
    for example in EXAMPLES[name]:
        model.model_validate_json(json.dumps(example))
