"""Mails to a real, scripted mail server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from email import message_from_bytes
from email.policy import default

import pytest

from tests.support.receivers.mail import MailServer, port_of, send_mail, serving
from worker_runtime.jobs.protocol.catalog import EmailReceipt, SendEmail, make_job
from worker_runtime.jobs.protocol.messages import JobOutcomeUnknown
from worker_runtime.jobs.types.mail import MailDeferred, MailRefused
from worker_runtime.protocol.errors import MalformedMessage

#: `tests/integration` imports these from here.


@pytest.fixture
def server() -> Iterator[MailServer]:
    with serving() as server:
        yield server


def test_a_mail_arrives_as_it_was_written(server: MailServer) -> None:
    text = "Zwei Käufe.\n.\n.. ein Punkt am Anfang\nEnde\n"
    receipt = send_mail(port_of(server), text)
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
        send_mail(port_of(server), timeout=0.3)
    server.pause = 0.0
    assert server.mails == []
    send_mail(port_of(server))
    assert len(server.mails) == 1


def test_two_sendings_of_a_job_have_the_same_id(server: MailServer) -> None:
    assert send_mail(port_of(server)) == send_mail(port_of(server))


@pytest.mark.parametrize("step", ["MAIL", "RCPT", "DATA", "."])
@pytest.mark.parametrize(("code", "kind"), [(451, MailDeferred), (550, MailRefused)])
def test_the_code_of_each_step_decides_whether_the_job_is_retried(
    server: MailServer, step: str, code: int, kind: type[MailDeferred | MailRefused]
) -> None:
    server.codes[step] = code
    with pytest.raises(kind) as caught:
        send_mail(port_of(server))
    assert caught.value.retryable is (kind is MailDeferred)
    assert str(code) in caught.value.detail


def test_a_connection_that_breaks_before_the_mail_is_tried_again(server: MailServer) -> None:
    server.codes["RCPT"] = 0
    with pytest.raises(MailDeferred):
        send_mail(port_of(server))
    assert server.mails == []


def test_a_connection_that_breaks_with_the_mail_under_way_leaves_the_outcome_unknown(
    server: MailServer,
) -> None:
    server.codes["."] = 0
    with pytest.raises(JobOutcomeUnknown) as caught:
        send_mail(port_of(server))
    assert not caught.value.retryable
    assert len(server.mails) == 1  # it was there all the same


@pytest.mark.parametrize("code", ["what", 354, 700])
def test_an_answer_to_the_text_that_is_not_smtp_leaves_the_outcome_unknown(
    server: MailServer, code: int | str
) -> None:
    server.codes["."] = code
    with pytest.raises(JobOutcomeUnknown):
        send_mail(port_of(server))
    assert len(server.mails) == 1


@pytest.mark.parametrize("subject", ["one\u2028two", "one\x85two", "one\x1ctwo"])
def test_a_subject_of_two_lines_is_refused_when_it_is_asked_for(subject: str) -> None:
    with pytest.raises(MalformedMessage):
        make_job("j", SendEmail(to="alice@example.com", subject=subject, text=""))


def test_a_server_that_is_away_is_tried_again() -> None:
    with serving() as server:
        port = port_of(server)
    with pytest.raises(MailDeferred):
        send_mail(port)


def test_a_refused_login_is_final_and_shows_no_password(server: MailServer) -> None:
    server.codes["AUTH"] = 535
    with pytest.raises(MailRefused) as caught:
        send_mail(port_of(server), username="berth")
    assert "secret" not in caught.value.detail


def test_a_password_that_smtp_cannot_send_is_final_and_is_not_shown(
    server: MailServer,
) -> None:
    with pytest.raises(MailRefused) as caught:
        send_mail(port_of(server), username="berth", password="geheim-ü")
    assert "ü" not in caught.value.detail
    assert caught.value.__suppress_context__  # the traceback, which is kept, has no cause either


def test_without_tls_nothing_is_sent_where_tls_is_wanted(server: MailServer) -> None:
    with pytest.raises(MailRefused):
        send_mail(port_of(server), username="berth", security="starttls")
    assert [command.split()[0].upper() for command in server.commands] == ["EHLO"]
