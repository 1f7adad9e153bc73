"""Encrypts what Temporal stores: payloads, memos, query and update results, and the texts of
failures.

AES-256-GCM under a key of the file `BERTH_TEMPORAL_CODEC_KEY_FILE`, which API and orchestrators
hold. Each payload names the version of its key, so earlier ones are read after a rotation. A new
version encrypts when it is a minute old: by then all hosts have the file, and each reads what
another writes. In clear is what Temporal and its SDK work with: ids and types of workflows, names
of signals and activities, codes of failures, search attributes, and the counters of local
activities.

A payload also names the namespace and the workflow it was made for, and the key authenticates both.
The SDK tells a codec for which workflow it decodes, so a payload that somebody moved to another
workflow is refused. The codec server is not told; it only shows.

A payload that is altered, moved or in clear is replaced by a marker, which the payload converter
refuses. An exception in the codec would fail the whole workflow task, again and again: one bad
signal would stop its workflow for good. The SDK drops a signal, rejects an update and fails a query
whose payload is refused.

Keys of the payload format 1 were made by releases that authenticated no names and read payloads in
clear. As long as the file holds one, both are read. It ends when the last of them leaves the file.
"""

import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    ActivitySerializationContext,
    CompositePayloadConverter,
    DataConverter,
    DefaultFailureConverterWithEncodedAttributes,
    DefaultPayloadConverter,
    EncodingPayloadConverter,
    PayloadCodec,
    SerializationContext,
    WithSerializationContext,
    WorkflowSerializationContext,
)

from infra.process_metrics import REFUSED
from infra.settings import Settings
from infra.vault.secret_versions import BOUND_PAYLOADS, SecretVersion, SecretVersionFile
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import BerthError

#: What Temporal's samples write into the metadata of an encrypted payload.
ENCODING = b"binary/encrypted"
#: The encoding of the marker that takes the place of a payload that was refused.
REFUSED_ENCODING = b"berth/refused"
_KEY_ID = "encryption-key-id"
_NAMESPACE = "namespace"
_WORKFLOW_ID = "workflow-id"
_NONCE_BYTES = 12
#: Seconds within which a new version is copied to all hosts.
KEY_COPY_TIME_S = 60.0
#: What a Schedule appends to the workflow id of its action.
_SCHEDULED_AT = re.compile(r"-\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
#: Payloads in clear that carry nothing: the `temporal` command needs no key to send them.
_EMPTY_JSON = (b"", b"null", b"{}")

log = structlog.get_logger()


class PayloadNotDecrypted(BerthError, code="PAYLOAD_NOT_DECRYPTED"):
    """A payload of Temporal cannot be read: altered, made for another workflow, not encrypted, or
    encrypted with a key that is not in the key file."""


@dataclass(frozen=True, slots=True)
class PayloadScope:
    """The workflow that a payload belongs to. The runs of a Schedule share one."""

    namespace: bytes = b""
    workflow_id: bytes = b""

    @classmethod
    def of_workflow(cls, namespace: str, workflow_id: str) -> Self:
        """Return the scope; the time that a Schedule appended to the id is left out, because the
        Schedule encrypts before there is a time."""
        return cls(namespace.encode(), _SCHEDULED_AT.sub("", workflow_id).encode())

    @classmethod
    def of_context(cls, context: SerializationContext) -> Self | None:
        if isinstance(context, WorkflowSerializationContext | ActivitySerializationContext):
            return cls.of_workflow(context.namespace, context.workflow_id or "")
        return None

    def authenticated(self, key_id: bytes) -> bytes:
        """Return what AES-GCM authenticates besides the data. Lengths keep one field from running
        into the next."""
        lengths = struct.pack(">HHH", len(key_id), len(self.namespace), len(self.workflow_id))
        return b"".join((b"berth/2", lengths, key_id, self.namespace, self.workflow_id))


class _CodecKeys:
    """The keys of the file, ready to use; shared by the copies of a codec."""

    def __init__(self, file: SecretVersionFile) -> None:
        self._file = file
        self._versions: tuple[SecretVersion, ...] = ()
        self._ciphers: dict[bytes, tuple[AESGCM, bool]] = {}
        #: Whether the file still holds a key of format 1.
        self.reads_old = False

    def read(self, *, now: bool = False) -> None:
        versions = self._file.present(now=now)
        if versions is not self._versions:
            self._versions = versions
            self._ciphers = {
                str(version.version).encode(): (AESGCM(version.secret), _is_bound(version))
                for version in versions
            }
            self.reads_old = not all(map(_is_bound, versions))

    def newest(self) -> tuple[bytes, AESGCM, bool]:
        """Return id, cipher and whether its payloads are bound, of the newest key that all hosts
        have."""
        settled = time.time() - KEY_COPY_TIME_S
        used = next((key for key in self._versions if key.made_at <= settled), self._versions[-1])
        key_id = str(used.version).encode()
        return (key_id, *self._ciphers[key_id])

    def find(self, key_id: bytes) -> tuple[AESGCM, bool] | None:
        if key_id not in self._ciphers:
            self.read(now=True)  # another process may have begun to use a key that was just made
        return self._ciphers.get(key_id)


def _is_bound(version: SecretVersion) -> bool:
    return version.payload_format >= BOUND_PAYLOADS


class PayloadEncryption(PayloadCodec, WithSerializationContext):
    """Encrypts with the newest version in the file that all hosts have, decrypts with any.

    `reads_clear`: also payloads in clear. `scope`: the workflow whose payloads these are; None: not
    known, so any workflow's are decrypted.
    """

    def __init__(
        self,
        keys: SecretVersionFile | _CodecKeys,
        *,
        reads_clear: bool = False,
        scope: PayloadScope | None = None,
        refused: RefusalCounter | None = None,
    ) -> None:
        self._keys = keys if isinstance(keys, _CodecKeys) else _CodecKeys(keys)
        self._reads_clear = reads_clear
        self._scope = scope
        # Labelled at once: an alert needs the zero before the first refusal.
        self.refused = refused or RefusalCounter(REFUSED.labels("temporal payload").inc)

    def with_context(self, context: SerializationContext) -> Self:
        return self.with_scope(PayloadScope.of_context(context))

    def with_scope(self, scope: PayloadScope | None) -> Self:
        if scope == self._scope:
            return self
        return type(self)(
            self._keys, reads_clear=self._reads_clear, scope=scope, refused=self.refused
        )

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        self._keys.read()
        return [self._encrypt(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypt payloads. Never raises: a marker takes the place of what is refused."""
        return [self._decrypt_or_mark(payload) for payload in payloads]

    def _encrypt(self, payload: Payload) -> Payload:
        key_id, cipher, bound = self._keys.newest()
        nonce = os.urandom(_NONCE_BYTES)
        metadata = {"encoding": ENCODING, _KEY_ID: key_id}
        authenticated = key_id
        if bound:
            scope = self._scope or PayloadScope()
            metadata |= {_NAMESPACE: scope.namespace, _WORKFLOW_ID: scope.workflow_id}
            authenticated = scope.authenticated(key_id)
        data = cipher.encrypt(nonce, payload.SerializeToString(), authenticated)
        return Payload(metadata=metadata, data=nonce + data)

    def _decrypt_or_mark(self, payload: Payload) -> Payload:
        try:
            return self.decrypt(payload)
        except PayloadNotDecrypted as error:
            if self.refused.add(repr(self._scope)):
                workflow_id = self._scope.workflow_id.decode() if self._scope else ""
                log.error("temporal_payload_refused", workflow_id=workflow_id, reason=error.detail)
            return Payload(metadata={"encoding": REFUSED_ENCODING}, data=error.detail.encode())

    def decrypt(self, payload: Payload) -> Payload:
        """Return the payload as it was encoded. Raises `PayloadNotDecrypted`."""
        self._keys.read()
        if payload.metadata.get("encoding") != ENCODING:
            if self._reads_clear or self._keys.reads_old or _is_empty(payload):
                return payload
            raise PayloadNotDecrypted("it is not encrypted")
        key_id = payload.metadata.get(_KEY_ID, b"")
        key = self._keys.find(key_id)
        if key is None:
            raise PayloadNotDecrypted(
                f"no key {key_id.decode('ascii', 'replace')[:20]!r} in the key file"
            )
        cipher, bound = key
        authenticated = key_id
        if bound:
            made_for = PayloadScope(
                payload.metadata.get(_NAMESPACE, b""), payload.metadata.get(_WORKFLOW_ID, b"")
            )
            if self._scope not in (None, made_for):
                shown = made_for.workflow_id.decode("ascii", "replace")[:100]
                raise PayloadNotDecrypted(f"it was made for the workflow {shown!r}")
            if max(map(len, (key_id, made_for.namespace, made_for.workflow_id))) > 0xFFFF:
                raise PayloadNotDecrypted("its names are too long")
            authenticated = made_for.authenticated(key_id)
        try:
            plain = cipher.decrypt(
                payload.data[:_NONCE_BYTES], payload.data[_NONCE_BYTES:], authenticated
            )
            return Payload.FromString(plain)
        except (InvalidTag, ValueError, DecodeError):
            raise PayloadNotDecrypted("it was altered, or encrypted under another key") from None


def _is_empty(payload: Payload) -> bool:
    encoding = payload.metadata.get("encoding", b"")
    if encoding in (b"", b"binary/null"):
        return not payload.data
    return encoding == b"json/plain" and payload.data.strip() in _EMPTY_JSON


def is_refused(payload: Payload) -> bool:
    """Return True for the marker of a payload that the codec refused."""
    return payload.metadata.get("encoding") == REFUSED_ENCODING


class _RefusedPayloads(EncodingPayloadConverter):
    """Refuses the codec's marker when somebody wants its value."""

    @property
    def encoding(self) -> str:
        return REFUSED_ENCODING.decode()

    def to_payload(self, value: Any) -> Payload | None:
        return None

    def from_payload(self, payload: Payload, type_hint: type | None = None) -> Any:
        raise PayloadNotDecrypted(payload.data.decode("utf-8", "replace")[:300])


class RefusingPayloadConverter(CompositePayloadConverter):
    """Converts as the SDK does, and refuses what the codec has refused."""

    def __init__(self) -> None:
        super().__init__(
            *DefaultPayloadConverter.default_encoding_payload_converters, _RefusedPayloads()
        )


def data_converter(settings: Settings) -> DataConverter:
    """Return the converter of all our clients; without a key file it encrypts nothing.

    Raises `KeyFileMissing`, `KeyFileExposed` or `KeyFileCorrupt`.
    """
    if not settings.temporal_codec_key_file:
        return DataConverter.default
    return DataConverter(
        payload_converter_class=RefusingPayloadConverter,
        payload_codec=PayloadEncryption(
            SecretVersionFile(Path(settings.temporal_codec_key_file)),
            reads_clear=settings.temporal_codec_reads_clear,
        ),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
