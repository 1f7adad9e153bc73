"""Encrypts a launch document for the environment,
where a container has no standard input (ADR 0012).

It is useless without the launch key, which comes as a file. AES-SIV gives the same text for the
same document: a repeated launch with other parameters is refused.
"""

import base64
import binascii

from worker_runtime.protocol.errors import BerthError

#: Variables of a container: the encrypted document, its worker's id, and the path of the key.
DOCUMENT = "BERTH_LAUNCH_DOCUMENT"
WORKER = "BERTH_LAUNCH_WORKER"
KEY_FILE = "BERTH_LAUNCH_KEY_FILE"
#: Bytes: AES-256 twice, for encryption and for authentication.
KEY_BYTES = 64
_PURPOSE = b"berth launch document 1"


class BadLaunchDocument(BerthError, code="BAD_LAUNCH_DOCUMENT"):
    """The launch document cannot be opened: another key, another worker's, or altered."""


class BadLaunchKey(BerthError, code="BAD_LAUNCH_KEY"):
    """The launch key is not 64 bytes in base64."""


def key_from(text: bytes) -> bytes:
    """Returns the key of a key file's content. Raises `BadLaunchKey`, never with a part of it."""
    try:
        key = base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error:
        raise BadLaunchKey from None
    if len(key) != KEY_BYTES:
        raise BadLaunchKey(f"the launch key has {len(key)} bytes instead of {KEY_BYTES}")
    return key


def seal(document: bytes, key: bytes, *, worker_id: str) -> str:
    """Returns the document encrypted for one worker, as text. The same arguments give the same
    text."""
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    return base64.b64encode(AESSIV(key).encrypt(document, [_PURPOSE, worker_id.encode()])).decode()


def unseal(text: str, key: bytes, *, worker_id: str) -> bytes:
    """Raises `BadLaunchDocument`."""
    # Here, not above: a zygote or job runner without such a document never loads it.
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    try:
        sealed = base64.b64decode(text, validate=True)
        return AESSIV(key).decrypt(sealed, [_PURPOSE, worker_id.encode()])
    except (binascii.Error, InvalidTag, ValueError):
        raise BadLaunchDocument from None
