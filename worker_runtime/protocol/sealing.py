"""Protects a claim on its way through Valkey: by seals, signatures and proofs.

- *Seal*: HPKE (RFC 9180: X25519, HKDF-SHA256, AES-256-GCM) to one worker's public key. The suite of
  `cryptography` takes no associated data, so user, account, epoch, claim and worker are bound as `info`.
- *Signature*: Ed25519 by the orchestrator over the whole claim; its public key is given at launch.
- *Proof*: HMAC-SHA256 under the worker's one-time launch token over its id and public key, so that nobody who
  can only write to Valkey can pass off another key as a worker's.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from cryptography.exceptions import InvalidSignature as _BadSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from worker_runtime.protocol.errors import InvalidSeal, InvalidSignature
from worker_runtime.protocol.messages import Message, Signed, decode, encode

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def new_worker_key() -> X25519PrivateKey:
    """A key pair for one session process; the private half never leaves it."""
    return X25519PrivateKey.generate()


def _info(user_id: str, account_id: str, epoch: int, claim_id: str, worker_id: str) -> bytes:
    parts = [b"berth/seal/1", *(p.encode() for p in (user_id, account_id, str(epoch), claim_id, worker_id))]
    # Length prefixes: no two different lists of parts give the same bytes.
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def seal(
    plaintext: bytes,
    public_key: bytes,
    *,
    user_id: str,
    account_id: str,
    epoch: int,
    claim_id: str,
    worker_id: str,
) -> bytes:
    """Encrypts so that only the holder of `public_key` (32 raw bytes) can read it, for this use only."""
    key = X25519PublicKey.from_public_bytes(public_key)
    return _SUITE.encrypt(plaintext, key, info=_info(user_id, account_id, epoch, claim_id, worker_id))


def unseal(
    sealed: bytes,
    private_key: X25519PrivateKey,
    *,
    user_id: str,
    account_id: str,
    epoch: int,
    claim_id: str,
    worker_id: str,
) -> bytes:
    """Opens what `seal` made; raises `InvalidSeal` if anything differs."""
    try:
        return _SUITE.decrypt(
            sealed, private_key, info=_info(user_id, account_id, epoch, claim_id, worker_id)
        )
    except Exception:  # the library's errors differ by what failed; the caller must not learn which
        raise InvalidSeal from None


def sign(message: Message, key: Ed25519PrivateKey) -> bytes:
    """The message as a signed envelope, ready to be pushed."""
    payload = encode(message)
    return encode(Signed(payload=payload, signature=key.sign(payload)))


def verify(data: bytes, public_key: Ed25519PublicKey) -> bytes:
    """The payload of a signed envelope.

    Raises `MalformedMessage` if it is no envelope, `InvalidSignature` if it is not the orchestrator's.
    """
    signed: Signed = decode(data, Signed)
    try:
        public_key.verify(signed.signature, signed.payload)
    except _BadSignature:
        raise InvalidSignature from None
    return signed.payload


def launch_token(secret: bytes, worker_id: str) -> bytes:
    """The one-time token of a worker: derived, so that the orchestrator need not store it."""
    return hmac.digest(secret, b"berth/launch/1:" + worker_id.encode(), sha256)


def prove_key(token: bytes, worker_id: str, public_key: bytes) -> bytes:
    """The worker's proof that `public_key` is its own."""
    return hmac.digest(token, b"berth/key/1:" + worker_id.encode() + b":" + public_key, sha256)


def check_key(token: bytes, worker_id: str, public_key: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(prove_key(token, worker_id, public_key), proof)
