"""Who may do what at compose's Temporal: the authorizer's configuration, the logins, and the UI.

There is no such server here to try it on. What is checked is what its source reads (server 1.31.2:
`common/config/config.go`, `common/authorization/default_jwt_claim_mapper.go`, `cmd/server/main.go`)
and the UI's (`docker/config-template.yaml` of temporalio/ui-server).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from joserfc import jwt
from joserfc.jwk import KeySet

from infra.compose.temporal_tokens import (
    LIFETIME_S,
    SYSTEM_ADMIN,
    ensure_tokens,
    worker_permissions,
)
from infra.local.process import accepts, free_port
from infra.settings import Settings
from infra.temporal.connection import read_api_key
from infra.vault.jwt import expiry_of
from tests.support.systems.local import until

ROOT = Path(__file__).resolve().parents[3]
#: The YAML names of `config.Authorization` and `config.JWTKeyProvider` in server 1.31.2.
AUTHORIZATION = {
    "jwtKeyProvider",
    "permissionsClaimName",
    "permissionsRegex",
    "authorizer",
    "claimMapper",
    "authHeaderName",
    "authExtraHeaderName",
    "audience",
}
KEY_PROVIDER = {"keySourceURIs", "refreshInterval"}
#: The services that `temporal-server start` can run.
SERVICES = {"frontend", "internal-frontend", "history", "matching", "worker"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    return loaded


def _server(second_source: str = "") -> dict[str, Any]:
    """Returns the server's configuration as its template renders it: the file has `if env`, `end`
    and `env` only."""
    text = (ROOT / "infra" / "compose" / "temporal-server.yaml").read_text(encoding="utf-8")
    condition = r'\s*\{\{- if env "TEMPORAL_JWT_KEY_SOURCE2" \}\}(.*?)\n\s*\{\{- end \}\}'
    text = re.sub(condition, r"\1" if second_source else "", text, flags=re.S)
    text = text.replace('{{ env "TEMPORAL_JWT_KEY_SOURCE2" }}', second_source)
    assert "{{" not in text
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_default_authorizer_and_claim_mapper_are_on() -> None:
    authorization = _server()["global"]["authorization"]
    assert set(authorization) <= AUTHORIZATION
    assert set(authorization["jwtKeyProvider"]) == KEY_PROVIDER
    # An empty string would mean: everybody may do everything.
    assert (authorization["authorizer"], authorization["claimMapper"]) == ("default", "default")


def test_the_servers_own_workers_have_a_frontend_of_their_own(services: dict[str, Any]) -> None:
    """They have no JWT. The server refuses to start with an internal frontend and a
    `publicClient`."""
    config = _server()
    assert set(config["services"]) == SERVICES
    assert "publicClient" not in config
    assert set(services["temporal"]["environment"]["TEMPORAL_SERVICES"].split(",")) == SERVICES
    ports = [
        port
        for service in config["services"].values()
        for name, port in service["rpc"].items()
        if "Port" in name
    ]
    assert len(ports) == len(set(ports))


def test_only_the_frontend_listens_where_another_container_may_reach_it() -> None:
    """The others ask nobody for a JWT. That a container does not reach them: tests/compose."""
    config = _server()
    bound = {name: service["rpc"]["bindOnIP"] for name, service in config["services"].items()}
    assert bound.pop("frontend") == "0.0.0.0"  # noqa: S104
    assert set(bound.values()) == {"127.0.0.1"}
    assert config["global"]["membership"]["broadcastAddress"] == "127.0.0.1", (
        "they find each other there"
    )


def test_only_what_temporal_needs_shares_a_network_with_it(services: dict[str, Any]) -> None:
    """A container in one network with the server reaches the frontend's membership port, which asks
    for no login."""
    own = set(services["temporal"]["networks"])
    beside = {name for name, service in services.items() if own & set(service.get("networks", []))}
    assert beside == {"temporal", "temporal-schema", "temporal-jwks", "temporal-proxy", "postgres"}
    for name, service in services.items():
        assert service.get("network_mode") in (None, "none"), name
    addresses = {
        value.removeprefix("passthrough:///")
        for service in services.values()
        for variable, value in service.get("environment", {}).items()
        if variable in ("BERTH_TEMPORAL_ADDRESS", "TEMPORAL_ADDRESS")
    }
    assert addresses == {"temporal-proxy:7233"}
    assert services["temporal-proxy"]["command"][-1] == "temporal:7233"


def test_the_key_set_is_where_the_server_looks_for_it(services: dict[str, Any]) -> None:
    [source] = _server()["global"]["authorization"]["jwtKeyProvider"]["keySourceURIs"]
    jwks = services["temporal-jwks"]
    assert source == f"http://temporal-jwks:{jwks['command'][-1]}/jwks.json"
    assert set(jwks["networks"]) <= set(services["temporal"]["networks"])
    assert services["temporal"]["depends_on"]["temporal-jwks"] == {"condition": "service_healthy"}
    both = _server("https://login.example/keys")["global"]["authorization"]["jwtKeyProvider"][
        "keySourceURIs"
    ]
    assert both == [source, "https://login.example/keys"]


def test_the_ui_is_off_by_default_and_never_without_a_login(services: dict[str, Any]) -> None:
    ui = services["temporal-ui"]
    assert ui["profiles"] == ["ui"]
    assert ui["environment"]["TEMPORAL_AUTH_ENABLED"] == "true"
    # Its secret is in a file that a person makes; `environment` would win over it.
    assert ui["env_file"] == [{"path": ".secrets/temporal-ui.env", "required": False}]
    assert not {name for name in ui["environment"] if name.startswith("TEMPORAL_AUTH_")} - {
        "TEMPORAL_AUTH_ENABLED",
        "TEMPORAL_AUTH_TYPE",
    }


def test_each_service_has_its_login_and_the_admins_is_the_registrations_only(
    services: dict[str, Any],
) -> None:
    with_login = {
        name: service["environment"]["BERTH_TEMPORAL_API_KEY_FILE"]
        for name, service in services.items()
        if "BERTH_TEMPORAL_API_KEY_FILE" in service.get("environment", {})
    }
    assert set(with_login) == {"prepare", "orchestrator", "api"}
    assert len(set(with_login.values())) == 1
    holders = {
        name
        for name, service in services.items()
        for volume in service.get("volumes", [])
        if "keys-temporal" in volume
    }
    assert holders == {"prepare", "temporal-jwks", "temporal-namespace"}
    # The web server shows the public folder, not the admin's login next to it.
    assert "/keys/temporal/public" in services["temporal-jwks"]["command"]
    login = services["temporal-namespace"]["environment"]["TEMPORAL_API_KEY_FILE"]
    assert login == "/keys/temporal/admin.jwt"
    image = (ROOT / "infra" / "images" / "server.Dockerfile").read_text(encoding="utf-8")
    assert f"USER {services['temporal-namespace']['user']}" in image, "who may read the file"


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Path]:
    paths = {"worker": tmp_path / "temporal.jwt", "admin": tmp_path / "admin.jwt"}
    permissions = {paths["worker"]: worker_permissions("default"), paths["admin"]: SYSTEM_ADMIN}
    assert ensure_tokens(tmp_path / "public" / "jwks.json", permissions) == list(paths.values())
    assert ensure_tokens(tmp_path / "public" / "jwks.json", permissions) == []
    return paths


def test_tokens_say_what_the_claim_mapper_reads(tokens: dict[str, Path], tmp_path: Path) -> None:
    served = KeySet.import_key_set(yaml.safe_load((tmp_path / "public" / "jwks.json").read_text()))
    permissions = {}
    for name, path in tokens.items():
        assert path.stat().st_mode & 0o777 == 0o600
        key = read_api_key(Settings(temporal_api_key_file=str(path)))
        assert key is not None
        token = jwt.decode(key, served, algorithms=["ES256"])
        assert token.header["kid"]
        assert isinstance(token.claims["sub"], str)
        permissions[name] = token.claims["permissions"]
    assert permissions == {"worker": ["default:write"], "admin": ["temporal-system:admin"]}


def test_new_tokens_come_with_a_new_key_next_to_the_one_before(
    tokens: dict[str, Path], tmp_path: Path
) -> None:
    before = tokens["worker"].read_text().strip()
    tokens["worker"].unlink()
    ensure_tokens(
        tmp_path / "public" / "jwks.json", {tokens["worker"]: worker_permissions("default")}
    )
    served = KeySet.import_key_set(yaml.safe_load((tmp_path / "public" / "jwks.json").read_text()))
    after = tokens["worker"].read_text().strip()
    kids = {
        jwt.decode(token, served, algorithms=["ES256"]).header["kid"] for token in (before, after)
    }
    assert kids == {key.kid for key in served.keys}
    assert len(kids) == 2


def test_tokens_end_and_are_made_anew_in_time(
    tokens: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_set = tmp_path / "public" / "jwks.json"
    permissions = {tokens["worker"]: worker_permissions("default"), tokens["admin"]: SYSTEM_ADMIN}
    now = time.time()
    for path in permissions:
        assert expiry_of(path.read_text()) == pytest.approx(now + LIFETIME_S, abs=60)
    monkeypatch.setattr(time, "time", lambda: now + LIFETIME_S / 2 - 60)
    assert ensure_tokens(key_set, permissions) == []
    monkeypatch.setattr(time, "time", lambda: now + LIFETIME_S / 2 + 60)
    assert ensure_tokens(key_set, permissions) == list(permissions)
    assert expiry_of(tokens["worker"].read_text()) > now + LIFETIME_S
    # Those of a release before had no end.
    head, _, signature = tokens["worker"].read_text().split(".")
    tokens["worker"].write_text(".".join((head, "e30", signature)))
    assert ensure_tokens(key_set, permissions) == list(permissions)


def test_the_web_server_of_compose_shows_the_key_set_and_no_login(
    services: dict[str, Any], tokens: dict[str, Path], tmp_path: Path
) -> None:
    port = free_port()
    words = [
        word.replace("/keys/temporal", str(tmp_path))
        for word in services["temporal-jwks"]["command"]
    ]
    command = [sys.executable, *words[1:-1], "--bind", "127.0.0.1", str(port)]
    plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: accepts(port), "web server")
            with plain.open(f"http://127.0.0.1:{port}/jwks.json", timeout=5) as answer:
                assert answer.read() == (tmp_path / "public" / "jwks.json").read_bytes()
            with pytest.raises(urllib.error.HTTPError):
                plain.open(f"http://127.0.0.1:{port}/../admin.jwt", timeout=5)
        finally:
            server.terminate()
