"""Key files that Secrets Manager keeps: pulled, followed, changed by one command at a time."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from infra.vault.secret_folders import (
    COMPLETE,
    SecretChanged,
    SecretFolders,
    SecretMalformed,
    SecretsUnavailable,
    run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # botocore's own use of datetime
    pytest.mark.timeout(60),
]
REGION = "ap-northeast-1"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    made = boto3.client("secretsmanager", REGION, endpoint_url=endpoint)
    yield made
    made.close()


def secret(client: Any, files: object) -> str:
    name = f"berth/{os.urandom(6).hex()}"
    return str(client.create_secret(Name=name, SecretString=json.dumps(files))["ARN"])


def test_files_are_private_and_follow_the_secret(client: Any, tmp_path: Path) -> None:
    arn = secret(client, {"message.key": "one", "public/jwks.json": "{}"})
    folder = tmp_path / "keys"
    folders = SecretFolders({folder: arn}, client)
    folders.pull()
    assert (folder / "message.key").read_text() == "one"
    assert (folder / "public" / "jwks.json").read_text() == "{}"
    assert stat.S_IMODE((folder / "message.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / COMPLETE).exists()
    inode = (folder / "message.key").stat().st_ino
    folders.pull()
    assert (folder / "message.key").stat().st_ino == inode  # nothing is written anew without need
    client.put_secret_value(SecretId=arn, SecretString=json.dumps({"message.key": "two"}))
    folders.pull()
    assert (folder / "message.key").read_text() == "two"
    assert not (folder / "public" / "jwks.json").exists()


def test_a_command_s_changes_are_stored_and_those_of_a_failed_one_are_not(
    client: Any, tmp_path: Path
) -> None:
    arn, other = secret(client, {}), secret(client, {"kept.key": "k"})
    folders = SecretFolders({tmp_path / "a": arn, tmp_path / "b": other}, client)
    program = f"open({str(tmp_path / 'a' / 'new.key')!r}, 'w').write('n')"
    assert run(folders, [sys.executable, "-c", f"{program}; raise SystemExit(3)"]) == 3
    assert client.get_secret_value(SecretId=arn)["SecretString"] == "{}"
    assert run(folders, [sys.executable, "-c", program]) == 0
    assert json.loads(client.get_secret_value(SecretId=arn)["SecretString"]) == {"new.key": "n"}
    assert len(client.list_secret_version_ids(SecretId=other)["Versions"]) == 1  # it was left alone


def test_of_two_commands_at_once_the_later_one_stores_nothing(client: Any, tmp_path: Path) -> None:
    arn = secret(client, {"a.key": "1"})
    first, second = (SecretFolders({tmp_path / name: arn}, client) for name in ("first", "second"))
    first.pull()
    second.pull()
    (tmp_path / "first" / "a.key").write_text("2")
    (tmp_path / "second" / "a.key").write_text("3")
    first.push()
    with pytest.raises(SecretChanged):
        second.push()
    assert json.loads(client.get_secret_value(SecretId=arn)["SecretString"]) == {"a.key": "2"}


@pytest.mark.parametrize(
    "files", [{"../x": "t"}, {"/x": "t"}, {".x": "t"}, {"a": 1}, ["a"], "a", {"": "t"}], ids=str
)
def test_a_secret_that_holds_no_files_writes_none(
    client: Any, tmp_path: Path, files: object
) -> None:
    folders = SecretFolders({tmp_path / "keys": secret(client, files)}, client)
    with pytest.raises(SecretMalformed):
        folders.pull()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_secret_is_said(client: Any, tmp_path: Path) -> None:
    with pytest.raises(SecretsUnavailable, match="ResourceNotFoundException"):
        SecretFolders({tmp_path: "berth/none"}, client).pull()


def environment(endpoint: str, folders: dict[Path, str]) -> dict[str, str]:
    """Removes the region, as in a container of ECS."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ENDPOINT_URL": endpoint,
        "BERTH_SECRET_FOLDERS": json.dumps({str(folder): arn for folder, arn in folders.items()}),
    }


def test_the_program_makes_the_keys_of_an_installation_once(
    endpoint: str, client: Any, tmp_path: Path
) -> None:
    """As the task `prepare` does, without its database."""
    names = ("private", "messages", "api")
    secrets = {tmp_path / name: secret(client, {}) for name in names}
    environ = environment(endpoint, secrets) | {
        "BERTH_MASTER_KMS_KEY": f"arn:aws:kms:{REGION}:123456789012:key/1",
        "BERTH_LAUNCHER": "ecs",
        "BERTH_ORCHESTRATOR_KEY_DIR": str(tmp_path / "private"),
        "BERTH_MESSAGE_KEY_FILE": str(tmp_path / "messages" / "message.key"),
        "BERTH_API_SECRET_FILE": str(tmp_path / "api" / "api.key"),
        "BERTH_ECS_LAUNCH_KEY_FILE": str(tmp_path / "private" / "launch-document.key"),
    }
    program = "from infra.vault import keyring; from infra.settings import Settings; "
    program += "keyring.create_missing_keys(Settings())"
    command = [
        sys.executable,
        "-m",
        "infra.vault.secret_folders",
        "run",
        sys.executable,
        "-c",
        program,
    ]
    subprocess.run(command, env=environ, check=True)
    stored = {name: client.get_secret_value(SecretId=secrets[tmp_path / name]) for name in names}
    files = {name: set(json.loads(answer["SecretString"])) for name, answer in stored.items()}
    assert files == {
        "private": {"signing.key", "launch.key", "budget.key", "launch-document.key"},
        "messages": {"message.key"},
        "api": {"api.key"},
    }
    subprocess.run(command, env=environ, check=True)
    again = {name: client.get_secret_value(SecretId=secrets[tmp_path / name]) for name in names}
    assert {n: a["VersionId"] for n, a in again.items()} == {
        n: a["VersionId"] for n, a in stored.items()
    }


def test_the_program_follows_until_it_is_ended(endpoint: str, client: Any, tmp_path: Path) -> None:
    arn = secret(client, {"a.key": "1"})
    command = [sys.executable, "-m", "infra.vault.secret_folders", "follow"]
    child = subprocess.Popen(
        command,
        env=environment(endpoint, {tmp_path / "keys": arn}),
        stderr=subprocess.PIPE,
        text=True,
    )
    late = threading.Timer(30, child.kill)
    late.start()
    assert child.stderr is not None
    assert "secret_pulled" in child.stderr.readline()
    assert (tmp_path / "keys" / "a.key").read_text() == "1"
    child.terminate()
    assert child.wait(10) != 0
    late.cancel()
    child.stderr.close()


def test_nonsense_gets_the_program_s_help() -> None:
    command = [sys.executable, "-m", "infra.vault.secret_folders"]
    for words in ([], ["run"], ["pull"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "follow" in done.stderr
