"""Folders of key files that AWS Secrets Manager keeps, for tasks without a disk that lasts.

    python -m infra.vault.secret_folders follow        keeps copying them into the folders
    python -m infra.vault.secret_folders run COMMAND   gives them to one command, and stores
                                                       what it changed

A secret holds the files of one folder (`BERTH_SECRET_FOLDERS`) as a JSON object, path → text: so a
role reads what its service needs, and no more. Processes follow replaced key files, so a rotation
reaches all tasks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import boto3
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.log import configure_log
from infra.setting_names import log_unread_variables
from infra.settings import Settings, read_settings
from infra.vault import key_file
from worker_runtime.protocol.errors import BerthError

#: Seconds between two looks at the secrets:
#: a rotation has to reach all tasks within `COPY_TIME_S`, a minute.
CHECK_INTERVAL_S = 20.0
#: Written into each folder when its files are there.
COMPLETE = ".complete"
_CONFIG = Config(
    connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 5}
)

log = structlog.get_logger()


class SecretsUnavailable(BerthError, code="SECRETS_UNAVAILABLE", retryable=True):
    """AWS Secrets Manager does not answer, or refuses this role."""


class SecretChanged(BerthError, code="SECRET_CHANGED"):
    """Another command changed the keys in the meantime, so nothing was stored. Run your command
    again."""


class SecretMalformed(BerthError, code="SECRET_MALFORMED"):
    """A secret does not hold files as a JSON object of texts."""


class SecretFolders:
    """Every method raises `SecretsUnavailable`."""

    def __init__(self, folders: Mapping[Path, str], client: Any = None) -> None:
        """Maps `folders` to the ARNs of their secrets, all of one region. `client` is one of
        Secrets Manager."""
        self._folders = folders
        # Not every agent of ECS names the region in the environment of a container.
        region = next((arn.split(":")[3] for arn in folders.values() if arn.count(":") > 3), None)
        self._client = client or boto3.client("secretsmanager", region_name=region, config=_CONFIG)
        #: What each folder held at the last `pull`: version and files.
        self._pulled: dict[Path, tuple[str, dict[str, str]]] = {}

    def pull(self) -> None:
        """Makes the folders what the secrets are.
        Raises `SecretMalformed`, and then changes nothing more."""
        for folder, arn in self._folders.items():
            version, files = self._read(arn)
            if self._pulled.get(folder, ("",))[0] == version:
                continue
            for name, text in files.items():
                key_file.write_key_file(folder / name, text.encode(), private=True)
            for name in _files_of(folder).keys() - files.keys():
                (folder / name).unlink()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / COMPLETE).touch()
            self._pulled[folder] = version, files
            log.info("secret_pulled", folder=str(folder), files=len(files))

    def push(self) -> list[Path]:
        """Stores the folders that differ from what was pulled; returns them. Raises
        `SecretChanged`."""
        changed = {}
        for folder, arn in self._folders.items():
            version, before = self._pulled[folder]
            files = _files_of(folder)
            if files == before:
                continue
            if self._read(arn)[0] != version:
                raise SecretChanged(f"{folder}: {SecretChanged.title()}")
            changed[folder] = files
        for folder, files in changed.items():
            text = json.dumps(files, sort_keys=True)
            stored = self._call(
                "put_secret_value", SecretId=self._folders[folder], SecretString=text
            )
            self._pulled[folder] = str(stored["VersionId"]), files
        return list(changed)

    def _read(self, arn: str) -> tuple[str, dict[str, str]]:
        answer = self._call("get_secret_value", SecretId=arn)
        try:
            files = json.loads(answer["SecretString"])
            if not all(isinstance(text, str) and _is_below(name) for name, text in files.items()):
                raise ValueError
        except (AttributeError, KeyError, ValueError):  # whose texts may quote the secret
            raise SecretMalformed(f"{arn}: {SecretMalformed.title()}") from None
        return str(answer["VersionId"]), files

    def _call(self, operation: str, **words: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, operation)(**words)
        except ClientError as error:
            raise SecretsUnavailable(
                f"{words['SecretId']}: {error.response['Error']['Code']}"
            ) from None
        except BotoCoreError as error:
            raise SecretsUnavailable(f"{words['SecretId']}: {type(error).__name__}") from None
        return answer


def _files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def _is_below(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(part.startswith((".", "/")) for part in parts)


def follow(folders: SecretFolders) -> None:
    """Pulls for ever. An outage or a secret that went bad leaves the files as they are."""
    while True:
        try:
            folders.pull()
        except (BerthError, OSError) as error:
            log.warning("secrets_not_pulled", reason=str(error)[:200])
        time.sleep(CHECK_INTERVAL_S)


def run(folders: SecretFolders, command: Sequence[str]) -> int:
    """Runs a command on the folders, and stores what it changed if it ended with 0. Returns its
    exit code.

    Raises what `pull` and `push` do.
    """
    folders.pull()
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        log.info("secrets_pushed", folders=[str(folder) for folder in folders.push()])
    return code


def main(words: Sequence[str]) -> int:
    settings = read_settings(Settings)
    configure_log(settings.log_level)
    log_unread_variables()
    try:
        match list(words):
            case ["follow"]:
                follow(SecretFolders(settings.secret_folders))
            case ["run", *command] if command:
                return run(SecretFolders(settings.secret_folders), command)
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 2
    except (BerthError, OSError) as error:
        sys.stderr.write(f"secret folders: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
