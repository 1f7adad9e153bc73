"""Claims on their way: only the right worker opens them, and only the orchestrator makes them."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from worker_runtime.protocol import sealing
from worker_runtime.protocol.errors import InvalidSeal, InvalidSignature, MalformedMessage
from worker_runtime.protocol.messages import ClaimReply, ReleaseClaim, decode

BINDING: dict[str, Any] = {
    "user_id": "42",
    "account_id": "main",
    "epoch": 7,
    "claim_id": "c-1",
    "worker_id": "w-1",
}


def seal(plaintext: bytes = b"secret") -> tuple[bytes, Any]:
    key = sealing.new_worker_key()
    return sealing.seal(plaintext, key.public_key().public_bytes_raw(), **BINDING), key


@given(st.binary(max_size=2000))
def test_the_named_worker_reads_what_was_sealed(plaintext: bytes) -> None:
    sealed, key = seal(plaintext)
    assert sealing.unseal(sealed, key, **BINDING) == plaintext


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused(position: int, bit: int) -> None:
    sealed, key = seal()
    data = bytearray(sealed)
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(InvalidSeal):
        sealing.unseal(bytes(data), key, **BINDING)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user_id", "43"),
        ("account_id", "other"),
        ("epoch", 8),
        ("claim_id", "c-2"),
        ("worker_id", "w-2"),
    ],
)
def test_another_user_account_epoch_claim_or_worker_is_refused(field: str, value: object) -> None:
    sealed, key = seal()
    with pytest.raises(InvalidSeal):
        sealing.unseal(sealed, key, **{**BINDING, field: value})


def test_another_workers_key_is_refused() -> None:
    sealed, _ = seal()
    with pytest.raises(InvalidSeal):
        sealing.unseal(sealed, sealing.new_worker_key(), **BINDING)


@given(st.binary(max_size=200))
def test_garbage_is_not_a_seal(garbage: bytes) -> None:
    with pytest.raises(InvalidSeal):
        sealing.unseal(garbage, sealing.new_worker_key(), **BINDING)


def test_fields_cannot_be_shifted_against_each_other() -> None:
    key = sealing.new_worker_key()
    sealed = sealing.seal(
        b"x", key.public_key().public_bytes_raw(), **{**BINDING, "user_id": "ab", "account_id": "c"}
    )
    with pytest.raises(InvalidSeal):
        sealing.unseal(sealed, key, **{**BINDING, "user_id": "a", "account_id": "bc"})


def test_a_signed_message_is_read_back_and_an_altered_one_is_not() -> None:
    orchestrator = Ed25519PrivateKey.generate()
    message = ReleaseClaim(claim_id="c", worker_id="w", reason="test")
    envelope = sealing.sign(message, orchestrator)
    assert decode(sealing.verify(envelope, orchestrator.public_key()), ReleaseClaim) == message
    with pytest.raises(InvalidSignature):
        sealing.verify(envelope, Ed25519PrivateKey.generate().public_key())


def test_one_signature_that_fits_one_known_key_is_enough() -> None:
    old, new, foreign = (Ed25519PrivateKey.generate() for _ in range(3))
    message = ReleaseClaim(claim_id="c", worker_id="w", reason="test")
    both = sealing.sign(message, new, old)
    for known in ([old], [new], [new, old], [foreign, old]):
        assert sealing.verify(both, *(key.public_key() for key in known))
        with pytest.raises(InvalidSignature):
            sealing.verify(
                sealing.sign(message, Ed25519PrivateKey.generate()), known[0].public_key()
            )
    with pytest.raises(InvalidSignature):
        sealing.verify(both, foreign.public_key())
    with pytest.raises(InvalidSignature):
        sealing.verify(sealing.sign(message), old.public_key())


def test_a_reply_is_read_with_the_token_of_either_launch_secret() -> None:
    reply = ClaimReply(claim_id="c", worker_id="w", epoch=1, attempt=1)
    tokens = [sealing.launch_token(secret * 32, "w") for secret in (b"n", b"o")]
    for token in tokens:
        assert sealing.open_reply(sealing.prove_reply(reply, token), *tokens) == reply
    with pytest.raises(InvalidSignature):
        sealing.open_reply(sealing.prove_reply(reply, tokens[1]), tokens[0])


@given(st.binary(max_size=300))
def test_garbage_is_not_a_signed_message(garbage: bytes) -> None:
    with pytest.raises((MalformedMessage, InvalidSignature)):
        sealing.verify(garbage, Ed25519PrivateKey.generate().public_key())


def test_a_public_key_is_proved_by_the_launch_token_of_its_worker() -> None:
    token = sealing.launch_token(b"s" * 32, "w-1")
    proof = sealing.prove_key(token, "w-1", b"k" * 32)
    assert sealing.check_key(token, "w-1", b"k" * 32, proof)
    assert not sealing.check_key(token, "w-1", b"x" * 32, proof)
    assert not sealing.check_key(token, "w-2", b"k" * 32, proof)
    assert not sealing.check_key(sealing.launch_token(b"s" * 32, "w-2"), "w-1", b"k" * 32, proof)
