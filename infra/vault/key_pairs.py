"""The local master key, which wraps data keys, and the orchestrators' own keys.

The master key is an X25519 pair, so that the API can hold the public half and only encrypt, while
the orchestrator holds the private half. On AWS, KMS permissions make the same split (`kms.py`).
"""

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from infra.vault import key_file
from infra.vault.key_file import KeyFileCorrupt
from infra.vault.secret_versions import SecretVersionFile, create_versions
from worker_runtime.protocol import sealing
from worker_runtime.protocol.errors import BerthError

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_PRIVATE = b"berth-master-private-1\n"
_PUBLIC = b"berth-master-public-1\n"


class UnwrapFailed(BerthError, code="UNWRAP_FAILED"):
    """A data key cannot be unwrapped: altered, or bound to another user or account."""


class UnknownMasterKey(BerthError, code="UNKNOWN_MASTER_KEY"):
    """The credentials were wrapped by a master key that is not available here."""


class KeyWrapper(Protocol):
    """The half that encrypts."""

    @property
    def key_id(self) -> str: ...

    async def wrap(self, data_key: bytes, context: bytes) -> bytes:
        """Wraps a data key. `context` binds the wrapped key to its use; unwrapping needs the same
        bytes."""


class KeyUnwrapper(Protocol):
    """The half that decrypts."""

    async def unwrap(self, wrapped: bytes, context: bytes, key_id: str) -> bytes:
        """Raises `UnwrapFailed` or `UnknownMasterKey`."""


def _key_id(public: bytes) -> str:
    return "local:" + sha256(public).hexdigest()[:16]


@dataclass(frozen=True)
class PublicMasterKey:
    """The public half of the master key: it can only wrap."""

    public: bytes

    @property
    def key_id(self) -> str:
        return _key_id(self.public)

    async def wrap(self, data_key: bytes, context: bytes) -> bytes:
        return _SUITE.encrypt(
            data_key, X25519PublicKey.from_public_bytes(self.public), info=context
        )


class MasterKeyRing:
    """Unwraps with any of its private keys: the present one and retired ones."""

    def __init__(self, present: X25519PrivateKey, *retired: X25519PrivateKey) -> None:
        self._keys = {
            _key_id(key.public_key().public_bytes_raw()): key for key in (present, *retired)
        }
        self.public = PublicMasterKey(present.public_key().public_bytes_raw())

    def holds(self, key_id: str) -> bool:
        return key_id in self._keys

    async def unwrap(self, wrapped: bytes, context: bytes, key_id: str) -> bytes:
        key = self._keys.get(key_id)
        if key is None:
            raise UnknownMasterKey(f"no master key {key_id} here")
        try:
            return _SUITE.decrypt(wrapped, key, info=context)
        except Exception:  # every failure means the same
            raise UnwrapFailed from None


class MasterKeyFiles:
    """Key files that are read again when an unknown key id is met.

    So a running orchestrator follows a rotation, which rewraps rows before the orchestrator is
    restarted. It keeps the old keys, since some rows still need them.
    """

    def __init__(self, present: Path, *retired: Path) -> None:
        """Raises what `load_ring` does."""
        self._paths = (present, *retired)
        self._rings = [load_ring(*self._paths)]

    async def unwrap(self, wrapped: bytes, context: bytes, key_id: str) -> bytes:
        """Raises `UnwrapFailed` or `UnknownMasterKey`."""
        ring = next((ring for ring in self._rings if ring.holds(key_id)), None)
        if ring is None:
            try:
                ring = load_ring(*self._paths)
            except (BerthError, OSError) as error:
                raise UnknownMasterKey(f"no master key {key_id} here, and {error}") from None
            if ring.holds(key_id):
                self._rings.append(ring)
        return await ring.unwrap(wrapped, context, key_id)


def create_master_key(private_file: Path, public_file: Path) -> PublicMasterKey:
    """Creates both files of a new pair; existing ones are replaced."""
    key = create_private_key(private_file)
    write_public(key, public_file)
    return key


def create_private_key(path: Path) -> PublicMasterKey:
    """Creates the private file of a new pair, or replaces it; returns the public half."""
    key = X25519PrivateKey.generate()
    key_file.write_key_file(
        path, _PRIVATE + key.private_bytes_raw().hex().encode() + b"\n", private=True
    )
    return PublicMasterKey(key.public_key().public_bytes_raw())


def write_public(key: PublicMasterKey, path: Path) -> None:
    key_file.write_key_file(path, _PUBLIC + key.public.hex().encode() + b"\n", private=False)


def _read_key(path: Path, header: bytes, *, private: bool) -> bytes:
    data = key_file.read_key_file(path, private=private)
    try:
        if not data.startswith(header):
            raise ValueError
        key = bytes.fromhex(data[len(header) :].decode("ascii").strip())
        if len(key) != 32:
            raise ValueError
    except (ValueError, UnicodeDecodeError):
        raise KeyFileCorrupt(f"{path} is not a key file of this kind") from None
    return key


def load_public(path: Path) -> PublicMasterKey:
    """Raises `KeyFileMissing` or `KeyFileCorrupt`."""
    return PublicMasterKey(_read_key(path, _PUBLIC, private=False))


def load_ring(present: Path, *retired: Path) -> MasterKeyRing:
    """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
    keys = [_read_key(path, _PRIVATE, private=True) for path in (present, *retired)]
    return MasterKeyRing(*map(X25519PrivateKey.from_private_bytes, keys))


class OrchestratorKey(StrEnum):
    """The orchestrators' secrets, a file each: `<name>.key`."""

    SIGNING = "signing"
    LAUNCH = "launch"
    BUDGET = "budget"


class OrchestratorKeys:
    """Secrets that all orchestrators share, with their versions;
    a process follows a rotation by itself.

    A worker gets what follows from them at its launch and keeps it, so the version before stays in
    use for the workers that were launched with it.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
        self._signing, self._launch, self._budget = (
            SecretVersionFile(orchestrator_key_file(folder, name)) for name in OrchestratorKey
        )

    @property
    def signing_keys(self) -> list[Ed25519PrivateKey]:
        """Sign what workers get, each of them: a worker accepts one whose public half it knows."""
        return [
            Ed25519PrivateKey.from_private_bytes(version.secret)
            for version in self._signing.present()
        ]

    @property
    def public_keys(self) -> tuple[bytes, ...]:
        """32 bytes each, which a worker gets at its launch."""
        return tuple(key.public_key().public_bytes_raw() for key in self.signing_keys)

    def budget_names(self, *owner: str) -> tuple[str, ...]:
        """Return the names under which workers count the calls of this owner, one for each version
        of the key, the oldest first. Each begins with its version."""
        return tuple(f"{version}-{name}" for version, name in self._budget_hashes(*owner))

    def former_budget_names(self, *owner: str) -> tuple[str, ...]:
        """Return the names that 0.1.0 uses,
        which counts by person alone, without the key's version."""
        return tuple(name for _, name in self._budget_hashes(*owner))

    def _budget_hashes(self, *owner: str) -> list[tuple[int, str]]:
        named = "\0".join(owner).encode()
        return [
            (secret.version, blake2b(named, key=secret.secret, digest_size=16).hexdigest())
            for secret in reversed(self._budget.present())
        ]

    def launch_token(self, worker_id: str) -> bytes:
        """Returns the launch token of a new worker."""
        return self.launch_tokens(worker_id)[0]

    def launch_tokens(self, worker_id: str) -> list[bytes]:
        """Returns the tokens with which this worker may have been launched, newest first.

        Looks at the file each time (a `stat`): another orchestrator may have launched the worker
        with a secret made a moment ago.
        """
        return [
            sealing.launch_token(secret.secret, worker_id)
            for secret in self._launch.present(now=True)
        ]


def orchestrator_key_file(folder: Path, name: OrchestratorKey) -> Path:
    return folder / f"{name}.key"


def create_orchestrator_keys(folder: Path) -> list[Path]:
    """Creates the missing files; returns those."""
    made = [
        path
        for name in OrchestratorKey
        if not (path := orchestrator_key_file(folder, name)).exists()
    ]
    for path in made:
        create_versions(path)
    return made
