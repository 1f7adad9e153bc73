"""Finds the secrets of a stack, and says whether a text has one."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode

from tests.support.systems.local import RunningSystem


def read_stack_secrets(system: RunningSystem) -> dict[str, bytes]:
    """The stack's private keys, passwords and administrator's key, decoded."""
    secrets_by_name = {}
    for path in system.stack.folder.keys.rglob("*"):
        if path.is_file() and path.suffix != ".pub":
            for number, word in enumerate(re.findall(rb"[\w+/=-]{32,}", path.read_bytes())):
                hexed = re.fullmatch(rb"[0-9a-f]{64}", word)
                encoded = re.fullmatch(rb"[A-Za-z0-9+/]{43}=", word)
                plain = (
                    bytes.fromhex(word.decode()) if hexed else b64decode(word) if encoded else word
                )
                secrets_by_name[f"{path.name} {number}"] = plain
    assert len(secrets_by_name) > 8
    return secrets_by_name


def contains_secret(text: bytes, secret: bytes) -> bool:
    """Returns True if the text has the secret: raw, in hex, or in base64 wherever it begins in what
    was encoded."""
    forms = [secret, secret.hex().encode(), secret.hex().upper().encode()]
    for before in range(3):
        # The first and last characters may depend on what is next to the secret.
        whole = b64encode(b"\0" * before + secret)[(8 * before + 5) // 6 :].rstrip(b"=")
        forms += [whole[:-1], whole[:-1].translate(bytes.maketrans(b"+/", b"-_"))]
    return any(form in text for form in forms)
