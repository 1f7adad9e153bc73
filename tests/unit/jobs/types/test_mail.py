"""Mails to a real, scripted mail server on this machine."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.policy import default

import pytest

from worker_runtime.jobs.config import MailOutlet
from worker_runtime.jobs.protocol.catalog import EmailReceipt, SendEmail, make_job
from worker_runtime.jobs.protocol.messages import JobOutcomeUnknown
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.mail import MailDeferred, MailRefused, email_job
from worker_runtime.protocol.errors import MalformedMessage


class MailServer(socketserver.ThreadingTCPServer):
    """Answers `codes` by command; 0: closes the connection. Keeps the commands and the mails."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _MailHandler)
        self.codes: dict[str, int | str] = {
            "MAIL": 250,
            "RCPT": 250,
            "DATA": 354,
            ".": 250,
            "AUTH": 235,
        }
        #: Seconds before each answer.
        self.pause = 0.0
        self.commands: list[str] = []
        self.mails: list[bytes] = []


class _MailHandler(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._say(220)
        while line := self.rfile.readline():
            text = line.decode().strip()
            self.server.commands.append(text)
            verb = text.split()[0].upper()
            if verb == "EHLO":
                self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
            elif not self._answer(verb):
                return

    def _answer(self, verb: str) -> bool:
        code = self.server.codes.get(verb, 250)
        return self._say(code) and (code != 354 or self._take())

    def _take(self) -> bool:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line[1:] if line.startswith(b".") else line)
        self.server.mails.append(b"".join(lines))
        return self._say(self.server.codes["."])

    def _say(self, code: int | str) -> bool:
        time.sleep(self.server.pause)
        if code:
            self.wfile.write(f"{code} so\r\n".encode())
        return bool(code)


@contextmanager
def serving() -> Iterator[MailServer]:
    with MailServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[MailServer]:
    with serving() as server:
        yield server


def send(
    port: int,
    text: str = "Hello",
    *,
    username: str = "",
    password: str = "secret",
    security: str = "none",
    timeout: float = 5.0,
) -> object:
    outlet = MailOutlet(
        host="127.0.0.1",
        port=port,
        sender="berth@example.com",
        security=security,  # type: ignore[arg-type]
        username=username,
        password=password,
        timeout=timeout,
    )
    work = SendEmail(to="alice@example.com", subject="Dein Auszug für heute", text=text)
    return email_job(outlet).run(work, JobContext("j-1", 1, 1, lambda _value: None))


def port_of(server: MailServer) -> int:
    return int(server.server_address[1])


def test_a_mail_arrives_as_it_was_written(server: MailServer) -> None:
    text = "Zwei Käufe.\n.\n.. ein Punkt am Anfang\nEnde\n"
    receipt = send(port_of(server), text)
    assert isinstance(receipt, EmailReceipt)
    [raw] = server.mails
    assert raw.isascii()
    mail = message_from_bytes(raw, policy=default)
    assert (mail["To"], mail["From"]) == ("alice@example.com", "berth@example.com")
    assert (mail["Subject"], mail["Message-ID"]) == ("Dein Auszug für heute", receipt.message_id)
    body = mail.get_body()
    assert body is not None
    assert body.get_content().replace("\r\n", "\n") == text


def test_a_server_whose_steps_take_longer_than_the_job_may_is_tried_again(
    server: MailServer,
) -> None:
    server.pause = 0.25  # each step in time: the greeting, MAIL, RCPT, DATA
    with pytest.raises(MailDeferred):
        send(port_of(server), timeout=0.3)
    server.pause = 0.0
    assert server.mails == []
    send(port_of(server))
    assert len(server.mails) == 1


def test_two_sendings_of_a_job_have_the_same_id(server: MailServer) -> None:
    assert send(port_of(server)) == send(port_of(server))


@pytest.mark.parametrize("step", ["MAIL", "RCPT", "DATA", "."])
@pytest.mark.parametrize(("code", "kind"), [(451, MailDeferred), (550, MailRefused)])
def test_the_code_of_each_step_tells_whether_to_try_again(
    server: MailServer, step: str, code: int, kind: type[MailDeferred | MailRefused]
) -> None:
    server.codes[step] = code
    with pytest.raises(kind) as caught:
        send(port_of(server))
    assert caught.value.retryable is (kind is MailDeferred)
    assert str(code) in caught.value.detail


def test_a_connection_that_breaks_before_the_mail_is_tried_again(server: MailServer) -> None:
    server.codes["RCPT"] = 0
    with pytest.raises(MailDeferred):
        send(port_of(server))
    assert server.mails == []


def test_a_connection_that_breaks_with_the_mail_under_way_leaves_the_outcome_unknown(
    server: MailServer,
) -> None:
    server.codes["."] = 0
    with pytest.raises(JobOutcomeUnknown) as caught:
        send(port_of(server))
    assert not caught.value.retryable
    assert len(server.mails) == 1  # it was there all the same


@pytest.mark.parametrize("code", ["what", 354, 700])
def test_an_answer_to_the_text_that_is_none_of_smtp_leaves_the_outcome_unknown(
    server: MailServer, code: int | str
) -> None:
    server.codes["."] = code
    with pytest.raises(JobOutcomeUnknown):
        send(port_of(server))
    assert len(server.mails) == 1


@pytest.mark.parametrize("subject", ["one\u2028two", "one\x85two", "one\x1ctwo"])
def test_a_subject_of_two_lines_is_refused_when_it_is_asked_for(subject: str) -> None:
    with pytest.raises(MalformedMessage):
        make_job("j", SendEmail(to="alice@example.com", subject=subject, text=""))


def test_a_server_that_is_away_is_tried_again() -> None:
    with serving() as server:
        port = port_of(server)
    with pytest.raises(MailDeferred):
        send(port)


def test_a_refused_login_is_final_and_tells_no_password(server: MailServer) -> None:
    server.codes["AUTH"] = 535
    with pytest.raises(MailRefused) as caught:
        send(port_of(server), username="berth")
    assert "secret" not in caught.value.detail


def test_a_password_that_smtp_cannot_send_is_final_and_tells_nothing_of_it(
    server: MailServer,
) -> None:
    with pytest.raises(MailRefused) as caught:
        send(port_of(server), username="berth", password="geheim-ü")
    assert "ü" not in caught.value.detail
    assert caught.value.__suppress_context__  # the traceback, which is kept, has no cause either


def test_without_tls_nothing_is_sent_where_tls_is_wanted(server: MailServer) -> None:
    with pytest.raises(MailRefused):
        send(port_of(server), username="berth", security="starttls")
    assert [command.split()[0].upper() for command in server.commands] == ["EHLO"]
