"""The orchestrator's own keys: Ed25519 to sign claims, and the secret that launch tokens derive from."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from infra.vault import key_file
from infra.vault.key_file import KeyFileCorrupt
from worker_runtime.protocol import sealing


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signing_key: bytes
    launch_secret: bytes


@dataclass(frozen=True, repr=False)
class OrchestratorKeys:
    """Shared by all orchestrators; the API and the workers never see it."""

    signing_key: Ed25519PrivateKey
    launch_secret: bytes

    @property
    def public_key(self) -> bytes:
        """32 bytes, given to each worker at its launch."""
        return self.signing_key.public_key().public_bytes_raw()

    def launch_token(self, worker_id: str) -> bytes:
        return sealing.launch_token(self.launch_secret, worker_id)


def create(path: Path) -> OrchestratorKeys:
    """Makes a new key file with mode 0600; an existing one is replaced."""
    keys = OrchestratorKeys(Ed25519PrivateKey.generate(), secrets.token_bytes(32))
    stored = _Stored(keys.signing_key.private_bytes_raw(), keys.launch_secret)
    key_file.write(path, msgspec.json.encode(stored), private=True)
    return keys


def load(path: Path) -> OrchestratorKeys:
    """Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`."""
    data = key_file.read(path, private=True)
    try:
        stored = msgspec.json.decode(data, type=_Stored)
        if len(stored.launch_secret) != 32:
            raise ValueError
        return OrchestratorKeys(
            Ed25519PrivateKey.from_private_bytes(stored.signing_key), stored.launch_secret
        )
    except ValueError:  # msgspec's errors are ValueErrors too
        raise KeyFileCorrupt(f"{path} is not an orchestrator's key file") from None
