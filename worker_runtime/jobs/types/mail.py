"""The job `email`: one mail to one address, by SMTP."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from worker_runtime.jobs.config import MailOutlet
from worker_runtime.jobs.protocol.catalog import JOB_KINDS, EmailReceipt, SendEmail
from worker_runtime.jobs.protocol.messages import JobFailed, JobOutcomeUnknown
from worker_runtime.jobs.types.deadline import TimeIsUp, connect, deadline, resolve
from worker_runtime.jobs.types.job_type import JobContext, JobType, RetryLater

if TYPE_CHECKING:
    import smtplib


class MailRefused(JobFailed, code="MAIL_REFUSED"):
    """The mail server refused the mail for good."""


class MailDeferred(RetryLater, code="MAIL_DEFERRED"):
    """The mail server cannot take the mail now."""


def email_job(outlet: MailOutlet) -> JobType:
    """Returns the type `email`, with the server that sends our mails."""

    def send(arguments: SendEmail, context: JobContext) -> EmailReceipt:
        message_id, data = _message(arguments, context.job_id, outlet.sender)
        _talk(outlet, arguments.to, data)
        return EmailReceipt(message_id=message_id)

    return JobType(name=JOB_KINDS[SendEmail].name, arguments=SendEmail, run=send)


def check_login(outlet: MailOutlet) -> None:
    """Logs in and sends nothing. Raises `MailRefused` or `MailDeferred`."""
    _talk(outlet, "", None)


def _talk(outlet: MailOutlet, to: str, data: bytes | None) -> None:
    """Logs in at the server, and sends one mail if there is one.
    For a main thread: it uses SIGALRM."""
    # Imported here: what mails need would cost every runner and child some MiB.
    import smtplib
    import ssl

    client: smtplib.SMTP | None = None

    class Client(smtplib.SMTP):
        def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
            nonlocal client
            client = self  # to be closed, whatever becomes of its greeting
            self.sock = connect(resolve(host, port))
            if outlet.security == "tls":
                secured = trust.wrap_socket(
                    self.sock, server_hostname=host, do_handshake_on_connect=False
                )
                self.sock = secured
                secured.do_handshake()
            return self.sock

    under_way = False
    try:
        with deadline(outlet.timeout):
            trust = ssl.create_default_context(cafile=outlet.ca_file or None)
            client = Client(outlet.host, outlet.port)
            client.ehlo_or_helo_if_needed()
            if outlet.security == "starttls":
                # `starttls` raises when the server has no TLS: nothing goes in clear.
                client.starttls(context=trust)
                client.ehlo()
            if outlet.username:
                client.login(outlet.username, outlet.password)
            if data is not None:
                _check("MAIL", *client.mail(outlet.sender))
                _check("RCPT", *client.rcpt(to))
                _check("DATA", *client.docmd("DATA"))
                under_way = True
                _send_text(client, data)
    except UnicodeError:  # its text quotes the password
        raise MailRefused("the mail server's name or login is not ASCII") from None
    except smtplib.SMTPResponseException as error:
        raise _mail_error(type(error).__name__, error.smtp_code) from None
    except (smtplib.SMTPNotSupportedError, ssl.SSLCertVerificationError) as error:
        raise MailRefused(f"the server cannot be used: {type(error).__name__}") from None
    except TimeIsUp:
        if under_way:
            raise JobOutcomeUnknown("the server did not confirm the mail in time") from None
        raise MailDeferred("the server is too slow") from None
    except OSError as error:  # all of smtplib's errors are, too
        raise MailDeferred(type(error).__name__) from None
    finally:
        if client is not None:
            client.close()


def _send_text(client: smtplib.SMTP, data: bytes) -> None:
    """Sends the text and reads the answer.
    If the connection breaks here, the outcome is unknown."""
    try:
        client.send(data)
        code, _ = client.getreply()
    except OSError as error:
        raise JobOutcomeUnknown(
            f"the connection broke with the mail under way: {type(error).__name__}"
        ) from None
    if code // 100 not in (2, 4, 5):
        raise JobOutcomeUnknown(f"the answer to the mail is none of SMTP: {code}")
    _check("the mail", code)


def _message(arguments: SendEmail, job_id: str, sender: str) -> tuple[str, bytes]:
    """Returns the mail's id, and its bytes for SMTP: CRLF, doubled points, the end."""
    import re
    from email.message import EmailMessage
    from email.policy import SMTP
    from email.utils import formatdate
    from hashlib import sha256

    # From the job's id, so that a mail that arrives twice can be recognised.
    message_id = f"<{sha256(job_id.encode()).hexdigest()[:32]}@{sender.rpartition('@')[2]}>"
    message = EmailMessage(policy=SMTP.clone(cte_type="7bit"))
    message["From"] = sender
    message["To"] = arguments.to
    message["Subject"] = arguments.subject
    message["Date"] = formatdate()
    message["Message-ID"] = message_id
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: machines shall not answer it
    message.set_content(arguments.text)
    data = re.sub(rb"(?m)^\.", b"..", message.as_bytes())
    return message_id, data + (b"" if data.endswith(b"\r\n") else b"\r\n") + b".\r\n"


def _check(step: str, code: int, _text: bytes = b"") -> None:
    """Raises unless the code means success.
    The server's text is left out: it may quote addresses."""
    if not 200 <= code < 400:
        raise _mail_error(step, code)


def _mail_error(step: str, code: int) -> MailRefused | MailDeferred:
    """Returns the error of an SMTP reply. RFC 5321, 4.2.1: 5yz is final, 4yz is not. Other codes
    mean no SMTP, or a lost connection (-1)."""
    text = f"{step}: {code}"
    return MailRefused(text) if 500 <= code < 600 else MailDeferred(text)
