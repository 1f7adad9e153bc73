"""Receivers that are slow on purpose: one deadline bounds a delivery, whatever it waits for."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.support.receivers.mail import send_mail
from tests.support.receivers.slow import dripping, nothing
from tests.support.receivers.webhooks import deliver, receiving
from worker_runtime.jobs.config import MessagingOutlet, PostOutlet
from worker_runtime.jobs.protocol.catalog import SendSms
from worker_runtime.jobs.protocol.messages import JobOutcomeUnknown
from worker_runtime.jobs.types import deadline, webhook_client
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.mail import MailDeferred
from worker_runtime.jobs.types.message import MessageDeferred, message_job
from worker_runtime.jobs.types.twilio import SmsProvider
from worker_runtime.jobs.types.webhook_client import AddressRefused, ReceiverUnreachable

TIMEOUT = 0.5
#: Seconds that a busy machine may add.
GRACE = 1.5


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < TIMEOUT + GRACE


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"", b"H"),
        (HEAD, b"X-More: and more\r\n"),
        (HEAD + b"X-Long: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["a byte now and then", "headers", "a header without an end", "informational answers"],
)
def test_a_webhook_whose_receiver_drips_ends_at_its_deadline(first: bytes, again: bytes) -> None:
    with dripping(first, again) as server, in_time(), pytest.raises(ReceiverUnreachable) as caught:
        deliver(f"http://127.0.0.1:{server.port}/", timeout=TIMEOUT)
    assert caught.value.sent
    assert "more than 0.5 s" in caught.value.detail


def test_a_tls_handshake_that_drips_ends_at_the_deadline() -> None:
    # The head of a record of 16 KiB, whose body never comes.
    with (
        dripping(b"\x16\x03\x03\x40\x00", b"\0") as server,
        in_time(),
        pytest.raises(ReceiverUnreachable),
    ):
        deliver(f"https://127.0.0.1:{server.port}/", timeout=TIMEOUT)


def test_a_body_without_an_end_ends_at_the_deadline() -> None:
    outlet = PostOutlet(timeout=TIMEOUT, allow_private=True)
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with dripping(head, b"1\r\nx\r\n") as server, in_time(), pytest.raises(ReceiverUnreachable):
        webhook_client.send_post(f"http://127.0.0.1:{server.port}/", b"{}", {}, outlet, 64 * 1024)


def test_a_receiver_that_takes_nothing_ends_at_the_deadline() -> None:
    outlet = PostOutlet(timeout=TIMEOUT, allow_private=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with in_time(), pytest.raises(ReceiverUnreachable):
            webhook_client.send_post(url, b"x" * 50_000_000, {}, outlet)


def test_a_name_that_is_not_resolved_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def never(*_: object, **__: object) -> Any:
        asked.wait(30)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never)
    with in_time(), pytest.raises(ReceiverUnreachable, match="more than"):
        deliver("https://slow.example/", timeout=TIMEOUT)
    asked.set()


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver, socket.create_server(("127.0.0.1", 0)) as full:
        port = receiver.server_address[1]
        full.close()
        addresses = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.9", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", answering(addresses))
        assert deliver(f"http://many.example:{port}/hook", timeout=5.0) is not None
        assert len(receiver.got) == 1


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with receiving() as receiver, socket.socket() as deaf:
        deaf.bind(("127.0.0.2", receiver.server_address[1]))
        deaf.listen(0)
        port = receiver.server_address[1]
        # Its queue is full: it answers no further one.
        with socket.create_connection(("127.0.0.2", port)):
            addresses = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))
                for host in ("127.0.0.2", "127.0.0.1")
            ]
            monkeypatch.setattr(socket, "getaddrinfo", answering(addresses))
            assert deliver(f"http://many.example:{port}/hook", timeout=4.0) is not None


def answering(addresses: list[Any]) -> Any:
    """Returns a resolver that knows the names of `.example`."""
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *args: Any, **options: Any) -> Any:
        return addresses if host.endswith(".example") else real(host, port, *args, **options)

    return look_up


def test_each_address_is_checked_and_private_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 443))
        for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", answering(addresses))
    with pytest.raises(AddressRefused):
        deliver("https://rebound.example/", allow_private=False)


@pytest.mark.parametrize(
    ("first", "again"),
    [(b"", b"2"), (b"220-hello\r\n", b"220-and more\r\n")],
    ids=["bytes", "lines"],
)
def test_a_mail_server_whose_greeting_drips_ends_at_the_deadline(
    first: bytes, again: bytes
) -> None:
    with dripping(first, again, nothing) as server, in_time(), pytest.raises(MailDeferred):
        send_mail(server.port, timeout=TIMEOUT)


def test_a_mail_server_that_drips_after_the_text_leaves_the_outcome_unknown() -> None:
    def until_text(link: socket.socket) -> None:
        lines = link.makefile("rwb", buffering=0)
        lines.write(b"220 here\r\n")
        while not (line := lines.readline()).startswith(b"DATA"):
            lines.write(b"250 ok\r\n")
            assert line
        lines.write(b"354 go on\r\n")

    with (
        dripping(b"", b"250-wait\r\n", until_text) as server,
        in_time(),
        pytest.raises(JobOutcomeUnknown),
    ):
        send_mail(server.port, timeout=TIMEOUT)


def test_an_sms_whose_provider_drips_has_an_unknown_outcome_and_is_not_sent_again() -> None:
    with dripping(HEAD, b"X: y\r\n") as server:
        outlet = MessagingOutlet(
            url=f"http://127.0.0.1:{server.port}",
            account="AC1",
            token="t",
            sms_sender="+886900000000",
            timeout=TIMEOUT,
            allow_private=True,
        )
        job = message_job(SmsProvider(outlet))
        with in_time(), pytest.raises(JobOutcomeUnknown):
            job.run(
                SendSms(to="+886912345678", text="hi"), JobContext("j", 1, 1, lambda _value: None)
            )


def test_deadlines_inside_each_other_end_at_the_first() -> None:
    def wait_inside() -> None:
        with deadline.deadline(TIMEOUT):
            with deadline.deadline(30.0):
                pass
            with deadline.deadline(30.0):
                threading.Event().wait(30)

    with in_time(), pytest.raises(deadline.TimeIsUp):
        wait_inside()


def test_a_provider_that_cannot_be_reached_in_time_is_asked_again() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            outlet = MessagingOutlet(
                url=f"http://127.0.0.1:{port}",
                account="AC1",
                token="t",
                sms_sender="+886900000000",
                timeout=TIMEOUT,
                allow_private=True,
            )
            job = message_job(SmsProvider(outlet))
            with in_time(), pytest.raises(MessageDeferred):
                job.run(
                    SendSms(to="+886912345678", text="hi"),
                    JobContext("j", 1, 1, lambda _value: None),
                )


def test_an_alarm_that_comes_after_its_block_ends_no_other_block() -> None:
    with deadline.deadline(30.0):
        # given a block that has ended at its time
        with suppress(deadline.TimeIsUp), deadline.deadline(0.01):
            while True:
                time.sleep(0.001)
        # when its alarm comes once more, then the block around it continues
        signal.raise_signal(signal.SIGALRM)
        assert deadline.time_left() > 29.0 - GRACE
    # and later blocks have their own time
    with deadline.deadline(30.0):
        assert deadline.time_left() > 29.0
