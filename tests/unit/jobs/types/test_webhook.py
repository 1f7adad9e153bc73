"""Deliveries to real receivers on this machine."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.receivers.webhooks import BODY, KEYS, Receiver, deliver, receiving
from worker_runtime.jobs.protocol.catalog import WebhookReceipt
from worker_runtime.jobs.protocol.webhook_signing import recipient_key
from worker_runtime.jobs.types.webhook import WebhookDeferred, WebhookRefused
from worker_runtime.jobs.types.webhook_client import (
    AddressRefused,
    CertificateRefused,
    ReceiverUnreachable,
    _is_public,
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def test_a_delivery_says_what_it_is_and_is_signed_with_every_key_of_its_recipient(
    receiver: Receiver,
) -> None:
    receipt = deliver(receiver.url)
    assert isinstance(receipt, WebhookReceipt)
    assert receipt.status == 200
    [(path, headers, body)] = receiver.got
    assert (path, body) == ("/hook?a=b", BODY)
    sent_headers = (headers["Berth-Delivery"], headers["Berth-Event"], headers["Berth-Attempt"])
    assert sent_headers == ("delivery-7", "order.filled", "2")
    assert headers["Content-Type"] == "application/json"
    at, *marks = headers["Berth-Signature"].split(",")
    assert abs(int(at.removeprefix("t=")) - time.time()) < 60
    for key, mark in zip(KEYS, marks, strict=True):
        own = recipient_key(key, "alice").encode()
        expected = hmac.digest(own, at.removeprefix("t=").encode() + b"." + BODY, "sha256").hex()
        assert mark == f"v1={expected}"
    assert recipient_key(KEYS[0], "alice") != recipient_key(KEYS[0], "bob")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_status_that_may_pass_asks_for_another_attempt(receiver: Receiver, status: int) -> None:
    receiver.answers = [(status, {"Retry-After": "17"})]
    with pytest.raises(WebhookDeferred) as caught:
        deliver(receiver.url)
    assert caught.value.retryable
    assert caught.value.retry_after == 17.0


@pytest.mark.parametrize("after", ["864000", "Mon, 01 Jan 99999999999 00:00:00 GMT", "01 Jan"])
def test_a_receiver_does_not_hold_a_delivery_back_for_days(receiver: Receiver, after: str) -> None:
    receiver.answers = [(503, {"Retry-After": after})]
    with pytest.raises(WebhookDeferred) as caught:
        deliver(receiver.url)
    assert caught.value.retry_after is None


@pytest.mark.parametrize("status", [400, 401, 404, 410])
def test_a_refusal_is_final(receiver: Receiver, status: int) -> None:
    receiver.answers = [(status, {})]
    with pytest.raises(WebhookRefused) as caught:
        deliver(receiver.url)
    assert not caught.value.retryable


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.answers = [(302, {"Location": receiver.url}), (200, {})]
    with pytest.raises(WebhookRefused, match="redirects"):
        deliver(receiver.url)
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/",
        "https://127.0.0.1:1/",
        "https://localhost:1/",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/",
        "https://[::127.0.0.1]/",
        "https://[::10.0.0.1]/",
        "https://[fec0::1]/",
        # Services of clouds, and addresses that lead to 169.254.169.254.
        "https://192.0.0.192/",
        "https://192.0.0.8/",
        "https://168.63.129.16/",
        "https://100.100.100.200/",
        "https://[::ffff:0:a9fe:a9fe]/",
        "https://[64:ff9b:1::a9fe:a9fe]/",
        "https://[2606:4700::5efe:a9fe:a9fe]/",
        "https://[2606:4700::200:5efe:a9fe:a9fe]/",
        "https://[fd00:ec2::254]/",
        # Special, but global in Python 3.11.
        "https://192.31.196.1/",
        "https://192.52.193.1/",
        "https://192.88.99.1/",
        "https://192.175.48.1/",
        "https://[2620:4f:8000::1]/",
        "https://[3fff::1]/",
        "https://[5f00::1]/",
        "https://[100:0:0:1::1]/",
        "https://[2001::1]/",
        "https://224.0.0.1/",
        "https://alice@example.com/",
        "https://example.com:99999/",
        "ftp://127.0.0.1/",
    ],
)
def test_nothing_is_sent_to_our_own_network_nor_in_clear(url: str) -> None:
    with pytest.raises(AddressRefused) as caught:
        deliver(url, allow_private=False)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "192.0.1.1", "168.63.129.17", "2606:4700::1111", "2001:4860:4860::8888", "2a00::1"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert _is_public(ipaddress.ip_address(address))


def test_plain_http_leads_to_this_machine_only() -> None:
    with pytest.raises(AddressRefused, match="plain http"):
        deliver("http://10.0.0.1/")


def test_a_receiver_that_is_away_or_silent_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ReceiverUnreachable) as caught:
            deliver(f"http://127.0.0.1:{port}/", timeout=0.2)
        assert caught.value.retryable
    with pytest.raises(ReceiverUnreachable):
        deliver(f"http://127.0.0.1:{port}/")


def test_a_certificate_has_to_be_valid_for_its_name(tmp_path: Path) -> None:
    path = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    with receiving(context) as receiver:
        with pytest.raises(CertificateRefused):
            deliver(receiver.url)
        with pytest.raises(CertificateRefused):
            deliver(receiver.url.replace("127.0.0.1", "localhost"), ca_file=str(path))
        assert deliver(receiver.url, ca_file=str(path)) is not None
        assert len(receiver.got) == 1


def test_the_usual_port_is_not_named_to_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    with receiving(context) as receiver:
        there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", receiver.server_address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
        deliver("https://127.0.0.1/hook", ca_file=str(path))
        deliver("https://127.0.0.1:8443/hook", ca_file=str(path))
    assert [headers["Host"] for _, headers, _ in receiver.got] == ["127.0.0.1", "127.0.0.1:8443"]


def _certificate(folder: Path) -> Path:
    """Writes a certificate for 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "receiver")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "receiver.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
