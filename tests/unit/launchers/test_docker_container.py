"""The Docker launcher makes a container of a spec, and reads the daemon's answers; without a
daemon."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.launchers.docker import container
from infra.launchers.docker.exits import DockerPosition
from infra.worker_task import LaunchFailed, LaunchSpec, signed_exit_code
from worker_runtime.protocol.launch import WorkerConfig

CONFIG = WorkerConfig(
    worker_id="w-1",
    pool="default",
    valkey_url="redis://:canary-password@valkey:6379/0",
    launch_token=b"canary-token",
    orchestrator_keys=(bytes(32),),
    version="1.2",
)


def document(spec: LaunchSpec) -> container.Document:
    return container.container_document(
        spec, image="berth-worker:1", network="workers", fleet="berth", now=1000.5
    )


def test_nothing_of_the_launch_document_is_in_the_container_s_description() -> None:
    text = json.dumps(document(LaunchSpec(config=CONFIG)))
    assert "w-1" in text
    assert "canary" not in text
    assert "valkey:6379" not in text
    assert "Env" not in text


def test_the_files_of_a_broker_s_sdk_find_room() -> None:
    assert document(LaunchSpec(config=CONFIG))["HostConfig"]["ShmSize"] >= 2 * 20 * 1024 * 1024


def test_labels_give_the_same_task_back() -> None:
    made = document(LaunchSpec(config=CONFIG))
    task = container.task_of("id-1", made["Labels"])
    assert (task.task_id, task.worker_id, task.pool, task.version) == (
        "id-1",
        "w-1",
        "default",
        "1.2",
    )
    assert task.launched_at == 1000.5


@pytest.mark.parametrize("worker_id", ["", "../w", "-w", "w" * 101, "w 1"])
def test_a_worker_id_that_docker_takes_for_no_name_is_refused(worker_id: str) -> None:
    config = WorkerConfig(
        worker_id=worker_id,
        pool="p",
        valkey_url="",
        launch_token=b"",
        orchestrator_keys=(bytes(32),),
    )
    with pytest.raises(LaunchFailed):
        document(LaunchSpec(config=config))


def test_a_token_has_one_name_in_a_fleet_and_another_in_the_next() -> None:
    assert container.container_name("a", "token") == container.container_name("a", "token")
    assert len({container.container_name(fleet, token) for fleet in "ab" for token in "xy"}) == 4


@pytest.mark.parametrize(
    ("status", "code"), [(0, 0), (71, 71), (137, -9), (143, -15), (128, 128), (255, 255)]
)
def test_an_exit_status_above_128_is_a_signal(status: int, code: int) -> None:
    assert signed_exit_code(status) == code


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:00:01.500000001Z", 1.5),
        ("1970-01-01T00:00:02Z", 2.0),
        ("1970-01-01T00:00:01.25Z", 1.25),
    ],
)
def test_the_daemon_s_dates_are_read_with_any_number_of_digits(text: str, at: float) -> None:
    assert container.finished_at({"State": {"FinishedAt": text}}) == at


@given(
    st.integers(min_value=0, max_value=2**63),
    st.frozensets(st.from_regex(r"[0-9a-f]{12}", fullmatch=True)),
)
def test_a_position_is_read_as_it_was_written(event_at: int, handled: frozenset[str]) -> None:
    position = DockerPosition(event_at, handled)
    assert DockerPosition.parse(str(position)) == position


@pytest.mark.parametrize("text", ["", "log-4711:12", "docker:", "docker:x:aa", "docker"])
def test_a_position_of_another_launcher_is_the_first_position(text: str) -> None:
    assert DockerPosition.parse(text) == DockerPosition()
