"""Paths of requests: below which root path, with which slashes, and without a webhook's token."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from api.http.paths import MAX_SHOWN_PATH_LENGTH, local_path, public_path, redacted_path
from infra.settings import Settings


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("/berth/v1/orders", "/v1/orders"),
        ("/v1/orders", "/v1/orders"),  # the proxy has cut the root path off
        ("/berth", "/"),
        ("/berth/", "/"),
        ("/", "/"),
        ("", "/"),
        ("//berth//v1//orders//", "/v1/orders"),
        ("/berthing/v1", "/berthing/v1"),
        ("/v1/orders/", "/v1/orders"),
    ],
)
def test_routes_get_the_path_below_the_root_path(path: str, local: str) -> None:
    assert local_path(path, "/berth") == local


@pytest.mark.parametrize(
    "path",
    [
        "/v1/webhooks/canary/orders",
        "/v1/webhooks/canary",
        "/v1/webhooks//canary/orders/",
        "//v1/webhooks/canary/orders",
        "/berth/v1/webhooks/canary/orders",
        "/V1/Webhooks/canary/orders",
        "/webhooks/canary/orders",
        "/v1/webhooks/canary\n/orders",
        "/v1/users/alice/webhooks/canary",
    ],
)
def test_a_webhooks_token_is_in_no_log_and_no_problem(path: str) -> None:
    assert "canary" not in redacted_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/users/alice/webhooks",
        "/v1/users/alice/webhooks/0199aaaa-0000-7000-8000-000000000000",
        "/v1/orders/1",
    ],
)
def test_a_path_without_a_token_is_shown(path: str) -> None:
    assert redacted_path(path) == path


def test_a_long_path_is_cut_where_it_is_shown() -> None:
    shown = public_path({"path": "/v1/" + "x" * 60_000})
    assert shown == "/v1/" + "x" * (MAX_SHOWN_PATH_LENGTH - 4) + "…"


@pytest.mark.parametrize("path", ["", "/", "/berth", "/berth/", "/a/b.c/~d_e-f"])
def test_a_root_path_is_kept_without_its_last_slash(path: str) -> None:
    assert Settings(api_root_path=path).api_root_path == path.rstrip("/")


@pytest.mark.parametrize(
    "path",
    [
        "berth",
        "/a b",
        "/a//b",
        "/..",
        "/a/../b",
        "/.",
        "/v1",
        "/v1/x",
        "/page",
        '/"',
        "/a;b",
        "/a?b",
        "/é",
        "//evil",
    ],
)
def test_a_root_path_that_would_not_stay_itself_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="api_root_path"):
        Settings(api_root_path=path)
