"""Encrypts what Temporal stores: payloads, memos, query and update results, and the texts of failures.

AES-256-GCM under a key of the file `BERTH_TEMPORAL_CODEC_KEY_FILE`, which API and orchestrators hold. Each
payload names the version of its key, so earlier ones are read after a rotation. A new version encrypts when
it is a minute old: by then all hosts have the file, and each reads what another writes. In clear is what
Temporal and its SDK work with: ids and types of workflows, names of signals and activities, codes of
failures, search attributes, and the counters of local activities.

Payloads in clear are read as they are: `temporal` on the command line sends such, and recorded histories hold
such. The server's authorizer says who may send any.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec

from infra.settings import Settings
from infra.vault.secret_versions import SecretVersion, SecretVersionFile
from worker_runtime.protocol.errors import BerthError

#: What Temporal's samples write into the metadata of an encrypted payload.
ENCODING = b"binary/encrypted"
_KEY_ID = "encryption-key-id"
_NONCE_BYTES = 12
#: Seconds within which a new version is copied to all hosts.
COPY_TIME = 60.0


class PayloadNotDecrypted(BerthError, code="PAYLOAD_NOT_DECRYPTED"):
    """A payload of Temporal cannot be decrypted: altered, or under a key that is not in the key file."""


class PayloadEncryption(PayloadCodec):
    """Encrypts with the newest version in the file that all hosts have, decrypts with any."""

    def __init__(self, keys: SecretVersionFile) -> None:
        self._keys = keys
        self._versions: tuple[SecretVersion, ...] = ()
        self._ciphers: dict[bytes, AESGCM] = {}

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        self._read_keys()
        return [self._encrypt(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Raises `PayloadNotDecrypted`."""
        self._read_keys()
        return [
            self._decrypt(payload) if payload.metadata.get("encoding") == ENCODING else payload
            for payload in payloads
        ]

    def _read_keys(self, *, now: bool = False) -> None:
        versions = self._keys.present(now=now)
        if versions is not self._versions:
            self._versions = versions
            self._ciphers = {str(one.version).encode(): AESGCM(one.secret) for one in versions}

    def _encrypt(self, payload: Payload) -> Payload:
        settled = time.time() - COPY_TIME
        used = next((one for one in self._versions if one.made_at <= settled), self._versions[-1])
        key_id = str(used.version).encode()
        nonce = os.urandom(_NONCE_BYTES)
        data = self._ciphers[key_id].encrypt(nonce, payload.SerializeToString(), key_id)
        return Payload(metadata={"encoding": ENCODING, _KEY_ID: key_id}, data=nonce + data)

    def _decrypt(self, payload: Payload) -> Payload:
        key_id = payload.metadata.get(_KEY_ID, b"")
        if key_id not in self._ciphers:
            self._read_keys(now=True)  # another process may have begun to use a key that was just made
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise PayloadNotDecrypted(f"no key {key_id.decode('ascii', 'replace')[:20]!r} in the key file")
        try:
            plain = cipher.decrypt(payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:], key_id)
            return Payload.FromString(plain)
        except (InvalidTag, ValueError, DecodeError):
            raise PayloadNotDecrypted from None


def data_converter(settings: Settings) -> DataConverter:
    """The converter of all our clients; without a key file it encrypts nothing.

    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    if not settings.temporal_codec_key_file:
        return DataConverter.default
    return DataConverter(
        payload_codec=PayloadEncryption(SecretVersionFile(Path(settings.temporal_codec_key_file))),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
