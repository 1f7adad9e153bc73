"""A scripted mail server on this machine, and a job that sends to it."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from worker_runtime.jobs.config import MailOutlet
from worker_runtime.jobs.protocol.catalog import SendEmail
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.mail import email_job


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


def send_mail(
    port: int,
    text: str = "Hello",
    *,
    username: str = "",
    password: str = "secret",
    security: str = "none",
    timeout: float = 5.0,
) -> object:
    """Runs a job that sends a mail with `text` to the server at `port`."""
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
