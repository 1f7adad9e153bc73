"""The logins of our own services at a self-hosted Temporal: JWTs, and the key set that its
authorizer reads.

A JWT names what its holder may do, as Temporal's default claim mapper reads it:
`<namespace>:write`, or `temporal-system:admin` for everything. The key that signs them is forgotten
at once: nobody can make more. New ones come with a new key; the key set keeps the one before, so
that the earlier ones count meanwhile.

A JWT ends after `LIFETIME_S`. Every `docker compose up`, which runs `prepare`, makes new ones when
less than half of it is left.
"""

import base64
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from infra.vault import key_file
from infra.vault.jwt import expiry_of

#: The permissions of `admin`: everything in every namespace.
SYSTEM_ADMIN = ("temporal-system:admin",)
_COORDINATE_BYTES = 32
#: Seconds a JWT counts: what somebody copied is of no use for ever. Half a year, because only a
#: start renews them, and a system without valid ones starts no workers.
LIFETIME_S = 180 * 86_400


def worker_permissions(namespace: str) -> tuple[str, ...]:
    """Returns what the API and the orchestrators need: to start, signal and serve workflows; no
    administration."""
    return (f"{namespace}:write",)


def ensure_tokens(key_set: Path, tokens: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Writes a JWT with its permissions into each file (mode 0600), unless all are there and will
    count for a while; returns these."""
    now = int(time.time())
    if key_set.exists() and all(_end_of(path) - now > LIFETIME_S / 2 for path in tokens):
        return []
    key = ec.generate_private_key(ec.SECP256R1())
    key_id = f"berth-{secrets.token_hex(8)}"
    before = json.loads(key_set.read_bytes())["keys"] if key_set.exists() else []
    keys = [_public(key.public_key(), key_id), *before][:2]  # the present one and the one before
    # The set first: Temporal reads it once a minute, and refuses a token whose key it has not seen.
    key_file.write_key_file(key_set, json.dumps({"keys": keys}).encode(), private=False)
    for path, permissions in tokens.items():
        signed = _token(key, key_id, subject=f"berth-{path.stem}", permissions=permissions)
        key_file.write_key_file(path, f"{signed}\n".encode(), private=True)
    return list(tokens)


def _end_of(path: Path) -> int:
    return (
        expiry_of(path.read_text(encoding="ascii", errors="replace").strip())
        if path.exists()
        else 0
    )


def _public(key: ec.EllipticCurvePublicKey, key_id: str) -> dict[str, str]:
    """Returns the public key as RFC 7517 says."""
    numbers = key.public_numbers()
    x, y = (_base64(number.to_bytes(_COORDINATE_BYTES, "big")) for number in (numbers.x, numbers.y))
    return {
        "kty": "EC",
        "crv": "P-256",
        "alg": "ES256",
        "use": "sig",
        "kid": key_id,
        "x": x,
        "y": y,
    }


def _token(
    key: ec.EllipticCurvePrivateKey, key_id: str, *, subject: str, permissions: Sequence[str]
) -> str:
    """Makes a token (RFC 7519), signed as RFC 7518 says (3.4): both numbers of the signature, 32
    bytes each."""
    head = {"alg": "ES256", "typ": "JWT", "kid": key_id}
    now = int(time.time())
    claims = {"sub": subject, "iat": now, "exp": now + LIFETIME_S, "permissions": list(permissions)}
    text = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
    numbers = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
    signature = b"".join(number.to_bytes(_COORDINATE_BYTES, "big") for number in numbers)
    return f"{text}.{_base64(signature)}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
