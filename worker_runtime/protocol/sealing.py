"""Protects a claim on its way through Valkey: by seals, signatures and proofs.

- *Seal*: HPKE (RFC 9180: X25519, HKDF-SHA256, AES-256-GCM) to one worker's public key. The suite of
  `cryptography` takes no associated data, so user, account, epoch, claim and worker are bound as
  `info`.
- *Signature*: Ed25519 by the orchestrator over the whole claim, by each signing key that it holds;
  their public halves are given at launch.
- *Proof*: HMAC-SHA256 under the worker's launch token over its id and public key, or over its reply
  to a claim, so that nobody who can only write to Valkey can pass off another key or reply as a
  worker's.
"""

import hmac
from hashlib import sha256
from itertools import product
from typing import TypedDict, Unpack

from cryptography.exceptions import InvalidSignature as _BadSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from worker_runtime.protocol.authentication import KEYS_ACCOUNT, AssignmentKeys, join_parts
from worker_runtime.protocol.errors import InvalidSeal, InvalidSignature, MalformedMessage
from worker_runtime.protocol.messages import ClaimReply, Message, Signed, decode, encode

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def new_worker_key() -> X25519PrivateKey:
    """Makes a key pair for one session process; the private half never leaves it."""
    return X25519PrivateKey.generate()


def is_usable_key(public_key: bytes) -> bool:
    """Returns True if something can be sealed to this public key; to some of 32 bytes (RFC 7748,
    6.1) it cannot."""
    try:
        new_worker_key().exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        return False
    return True


class WorkerBinding(TypedDict):
    """Whom a seal is for: no other assignment opens it."""

    user_id: str
    epoch: int
    claim_id: str
    worker_id: str


class SealBinding(WorkerBinding):
    """The same for one account of the user."""

    account_id: str


def _info(binding: SealBinding) -> bytes:
    whose = (binding["user_id"], binding["account_id"], str(binding["epoch"]))
    texts = (*whose, binding["claim_id"], binding["worker_id"])
    return join_parts([b"berth/seal/1", *(text.encode() for text in texts)])


def seal(plaintext: bytes, public_key: bytes, **binding: Unpack[SealBinding]) -> bytes:
    """Encrypts so that only the holder of `public_key`
    (32 raw bytes) can read it, for this use only."""
    return _SUITE.encrypt(
        plaintext, X25519PublicKey.from_public_bytes(public_key), info=_info(binding)
    )


def seal_message_keys(
    message_keys: AssignmentKeys, public_key: bytes, **binding: Unpack[WorkerBinding]
) -> bytes:
    """Seals, like an account, the keys with which a worker and the services authenticate their
    messages."""
    return seal(encode(message_keys), public_key, account_id=KEYS_ACCOUNT, **binding)


def unseal(sealed: bytes, private_key: X25519PrivateKey, **binding: Unpack[SealBinding]) -> bytes:
    """Opens what `seal` made; raises `InvalidSeal` if anything differs."""
    try:
        return _SUITE.decrypt(sealed, private_key, info=_info(binding))
    except Exception:  # the library's errors differ by what failed; the caller must not learn which
        raise InvalidSeal from None


def open_message_keys(
    sealed: bytes, private_key: X25519PrivateKey, **binding: Unpack[WorkerBinding]
) -> AssignmentKeys:
    """Opens what `seal_message_keys` made; raises `InvalidSeal`."""
    clear = unseal(sealed, private_key, account_id=KEYS_ACCOUNT, **binding)
    try:
        return decode(clear, AssignmentKeys)
    except MalformedMessage:  # without the cause: its text comes from what was sealed
        raise InvalidSeal("what was sealed are no message keys") from None


def sign(message: Message, *signing_keys: Ed25519PrivateKey) -> bytes:
    """Returns the message as an envelope signed by each key, ready to be pushed."""
    payload = encode(message)
    return encode(Signed(payload=payload, signatures=[key.sign(payload) for key in signing_keys]))


def verify(data: bytes, *public_keys: Ed25519PublicKey) -> bytes:
    """Returns the payload of an envelope that one of the keys has signed.

    Raises `MalformedMessage` if it is no envelope,
    `InvalidSignature` if it is not the orchestrator's.
    """
    signed: Signed = decode(data, Signed)
    for public_key, signature in product(public_keys, signed.signatures):
        try:
            public_key.verify(signature, signed.payload)
        except _BadSignature:
            continue
        return signed.payload
    raise InvalidSignature


def launch_token(secret: bytes, worker_id: str) -> bytes:
    """Returns the one-time token of a worker: derived, so that the orchestrator need not store
    it."""
    return hmac.digest(secret, b"berth/launch/1:" + worker_id.encode(), sha256)


def prove_key(token: bytes, worker_id: str, public_key: bytes) -> bytes:
    """Returns the worker's proof that `public_key` is its own."""
    return hmac.digest(token, b"berth/key/1:" + worker_id.encode() + b":" + public_key, sha256)


def check_key(token: bytes, worker_id: str, public_key: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(prove_key(token, worker_id, public_key), proof)


def prove_reply(reply: ClaimReply, token: bytes) -> bytes:
    """Returns the reply in an envelope that only the holder of the worker's launch token can make.

    Not under a key that came with the claim:
    a worker that cannot open the claim has to say so, too.
    """
    payload = encode(reply)
    return encode(Signed(payload=payload, signatures=[_prove_payload(token, payload)]))


def open_reply(data: bytes, *tokens: bytes) -> ClaimReply:
    """Opens a reply. `tokens` are the worker's under each launch secret that is held.

    Raises `MalformedMessage`, and `InvalidSignature` if it is not from the holder of one of them.
    """
    signed: Signed = decode(data, Signed)
    proofs = [_prove_payload(token, signed.payload) for token in tokens]
    if not any(hmac.compare_digest(*pair) for pair in product(proofs, signed.signatures)):
        raise InvalidSignature("the reply was not made with the worker's launch token")
    reply: ClaimReply = decode(signed.payload, ClaimReply)
    return reply


def _prove_payload(token: bytes, payload: bytes) -> bytes:
    return hmac.digest(token, b"berth/reply/1:" + payload, sha256)
