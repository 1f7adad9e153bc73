"""The message secret, from which the keys of all messages in Valkey are derived.

The API and the orchestrators hold it; workers get only keys of their own user and epoch, and
the runners of the fleet's jobs those of its jobs, in a file of their own (`write_fleet_keys`).
Its file has the present version and the one before. A process reads the file again within a
second after it was replaced, so a rotation needs no restart: messages carry a MAC of each
version that their author holds.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.vault import key_file
from infra.vault.key_file import KeyFileCorrupt
from infra.vault.secret_versions import CHECK_INTERVAL_S, SecretVersion, SecretVersionFile
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys
from worker_runtime.protocol.authentication import AssignmentKeys, MessageKey, derive_key

#: Seconds between two comparisons with other hosts.
COMPARE_INTERVAL_S = 60.0
#: Users whose keys are kept derived.
_MAX_CACHED_USERS = 20_000

log = structlog.get_logger()

Keys = tuple[MessageKey, ...]


class MessageSecrets:
    """Derives the keys of users and assignments, newest version first. It stores none of them."""

    def __init__(self, versions: Sequence[SecretVersion]) -> None:
        """Derives keys from `versions`, newest first."""
        self.versions = tuple(versions)
        self._derived: dict[tuple[bytes, ...], Keys] = {}
        #: The generations of each application's key that count, newest first
        #: (`infra/jobs/applications.py`).
        self._generations: dict[str, tuple[int, ...]] = {}

    def request_keys(self, user_id: str) -> Keys:
        """Returns the keys of the user's requests and switch, whichever worker serves the user."""
        return self._keys(b"request", user_id.encode())

    def service_keys(self, user_id: str) -> Keys:
        """Returns the keys of answers to the user's requests that the API or an orchestrator gives;
        no worker has them."""
        return self._keys(b"service", user_id.encode())

    def job_keys(self, tag: str) -> Keys:
        """Returns the keys of a tag's jobs and results.

        A user's own jobs have the user's request keys. An application's jobs have those of the
        generations that `set_generations` has named, else of the first.
        """
        if application := job_keys.application_of_tag(tag):
            return self.application_keys(application, self._generations.get(application, (1,)))
        fleet = tag == job_keys.FLEET_TAG
        return self._keys(b"jobs") if fleet else self.request_keys(tag.removeprefix("user:"))

    def set_generations(self, generations: Mapping[str, tuple[int, ...]]) -> None:
        """Say which applications there are,
        and which generations of their keys count, newest first."""
        self._generations = dict(generations)

    def application_keys(self, application: str, generations: Sequence[int]) -> Keys:
        """Return the keys of an application's jobs, results and manifests, newest first.

        `generations`: newest first, each 1 to 999.
        `berth jobs application rotate` makes the next one.
        """
        names = {
            generation: self._keys(b"application", application.encode(), str(generation).encode())
            for generation in generations
        }
        # A key's number has both: a rotation of either makes a key that is newer than all before.
        return tuple(
            MessageKey(1000 * key.version + generation, key.key)
            for keys_of_version in zip(*names.values(), strict=True)
            for generation, key in zip(generations, keys_of_version, strict=True)
        )

    def kept_keys(self, user_id: str) -> Keys:
        """Returns the keys of the jobs that PostgreSQL keeps; no worker has them."""
        return self._keys(b"kept_jobs", user_id.encode())

    def assignment_keys(self, user_id: str, epoch: int) -> Keys:
        """Returns the keys of what the user's worker of this epoch writes."""
        return self._keys(b"assignment", user_id.encode(), str(epoch).encode())

    async def compare_with_others(self, client: Redis) -> None:
        """Says once a minute which versions are not those of other hosts: theirs are refused here,
        and ours there. The first host's fingerprints stand in Valkey for an hour."""
        while True:
            try:
                for secret in self._keys(b"fingerprint"):
                    mine, key = secret.key.hex(), keys.secret(secret.version)
                    others = await client.set(key, mine, nx=True, get=True, ex=keys.CLAIM_TTL_S)
                    if others not in (None, mine.encode()):
                        hint = (
                            "other hosts have another secret under this version: copy one "
                            "file to all"
                        )
                        log.error("message_secret_differs", version=secret.version, hint=hint)
            except (RedisError, OSError) as error:
                log.warning("message_secret_not_compared", error=type(error).__name__)
            await asyncio.sleep(COMPARE_INTERVAL_S)

    def for_worker(self, user_id: str, epoch: int) -> AssignmentKeys:
        """Returns the keys that the worker of this assignment gets."""
        return AssignmentKeys(
            request=self.request_keys(user_id), assignment=self.assignment_keys(user_id, epoch)
        )

    def _keys(self, *purpose: bytes) -> Keys:
        derived = self._derived.get(purpose)
        if derived is None:
            if len(self._derived) >= _MAX_CACHED_USERS:
                self._derived.clear()
            derived = self._derived[purpose] = tuple(
                MessageKey(secret.version, derive_key(secret.secret, b"berth/message/1", *purpose))
                for secret in self.versions
            )
        return derived


class MessageSecretFile(MessageSecrets):
    """The secrets of a file, which is read again when it was replaced;
    one that went bad changes nothing."""

    def __init__(self, path: Path, *, check_period: float = CHECK_INTERVAL_S) -> None:
        """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
        self._file = SecretVersionFile(path, check_period=check_period)
        super().__init__(self._file.present())

    def _keys(self, *purpose: bytes) -> Keys:
        versions = self._file.present()
        if versions is not self.versions:
            self.versions = versions
            self._derived.clear()
        return super()._keys(*purpose)


def write_fleet_keys(path: Path, message_key_file: Path) -> bool:
    """Writes the keys of the fleet's jobs,
    which are all that its runners need of the message secret.

    Returns False if the file holds them already. Raises `KeyFileMissing`, `KeyFileExposed` or
    `KeyFileCorrupt`.
    """
    return write_keys(path, MessageSecretFile(message_key_file).job_keys(job_keys.FLEET_TAG))


def write_keys(path: Path, derived: Keys) -> bool:
    """Write derived keys, as `load_fleet_keys` reads them.
    Returns False if the file holds them already.

    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    data = msgspec.json.encode(derived)
    if path.exists() and key_file.read_key_file(path, private=True) == data:
        return False
    key_file.write_key_file(path, data, private=True)
    return True


def load_fleet_keys(path: Path) -> Keys:
    """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
    try:
        fleet_keys = msgspec.json.decode(key_file.read_key_file(path, private=True), type=Keys)
    except ValueError:  # msgspec's errors are ValueErrors; none may show a key
        raise KeyFileCorrupt(f"{path} does not hold the keys of the fleet's jobs") from None
    if not fleet_keys:
        raise KeyFileCorrupt(f"{path} does not hold the keys of the fleet's jobs")
    return fleet_keys
