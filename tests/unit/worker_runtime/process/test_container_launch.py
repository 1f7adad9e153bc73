"""The launch document of a container without standard input: encrypted in the environment."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest

from tests.support.workers.launch_config import CONFIG
from tests.support.workers.task_metadata import TASK_ID, metadata_server
from worker_runtime.process import config
from worker_runtime.process.config import BadConfig
from worker_runtime.protocol import launch_document
from worker_runtime.protocol.launch_document import BadLaunchDocument, BadLaunchKey

KEY = bytes(range(64))


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a container's environment, with the document and the mounted key."""
    path = tmp_path / "launch.key"
    path.write_bytes(base64.encodebytes(KEY))
    document = launch_document.seal(msgspec.json.encode(CONFIG), KEY, worker_id=CONFIG.worker_id)
    monkeypatch.setenv(launch_document.DOCUMENT, document)
    monkeypatch.setenv(launch_document.WORKER, CONFIG.worker_id)
    monkeypatch.setenv(launch_document.KEY_FILE, str(path))
    monkeypatch.delenv(config.METADATA_VARIABLE, raising=False)


def test_the_document_is_read_without_standard_input(environment: None) -> None:
    assert config.read_config(-1) == CONFIG


@pytest.mark.parametrize("refusals", [0, 2])
def test_the_task_id_comes_from_the_metadata_of_ecs(
    environment: None, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    with metadata_server(refusals) as base:
        monkeypatch.setenv(config.METADATA_VARIABLE, base)
        assert config.read_config(-1) == msgspec.structs.replace(CONFIG, task_id=TASK_ID)


def test_a_worker_that_cannot_learn_its_task_does_not_start() -> None:
    nobody = {config.METADATA_VARIABLE: "http://127.0.0.1:1/v4/0f3c"}
    with pytest.raises(BadLaunchDocument, match="task's id"):
        config.read_task_id(nobody, patience=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (launch_document.WORKER, "w2"),
        (launch_document.DOCUMENT, "bm90aGluZw=="),
        (launch_document.DOCUMENT, "!"),
        (launch_document.KEY_FILE, "/nowhere/launch.key"),
    ],
)
def test_a_document_that_cannot_be_opened_is_a_bad_configuration(
    environment: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadConfig):
        config.read_config(-1)


def test_the_same_document_is_the_same_text_and_another_worker_s_is_not() -> None:
    sealed = launch_document.seal(b"document", KEY, worker_id="w1")
    assert sealed == launch_document.seal(b"document", KEY, worker_id="w1")
    assert sealed != launch_document.seal(b"document", KEY, worker_id="w2")
    assert launch_document.unseal(sealed, KEY, worker_id="w1") == b"document"
    with pytest.raises(BadLaunchDocument):
        launch_document.unseal(sealed, bytes(64), worker_id="w1")


@pytest.mark.parametrize("text", [b"", b"short", base64.b64encode(bytes(63)), b"\xff" * 88])
def test_a_launch_key_of_another_kind_is_refused_without_showing_it(text: bytes) -> None:
    with pytest.raises(BadLaunchKey) as raised:
        launch_document.key_from(text)
    assert text.decode("latin-1") not in raised.value.detail or not text
