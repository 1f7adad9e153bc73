"""A receiver of webhooks on this machine that answers as a test says and keeps what it got, and a
job that sends to it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from worker_runtime.jobs.config import WebhookOutlet
from worker_runtime.jobs.protocol.catalog import DeliverWebhook
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.webhook import webhook_job


class Receiver(ThreadingHTTPServer):
    """`answers`: (status, headers) by turns; the last one stays."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _WebhookHandler)
        self.answers: list[tuple[int, dict[str, str]]] = [(200, {})]
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.scheme = "http" if context is None else "https"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/hook?a=b"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle, as one does that trusts no such certificate."""


class _WebhookHandler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, dict(self.headers), body))
        answers = self.server.answers
        status, headers = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the tests' output."""


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    with Receiver(context) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


#: With which `deliver` signs.
KEYS = (b"n" * 32, b"o" * 32)
BODY = b'{"order": "o-1",  "state":"filled"}'


def deliver(
    url: str, *, timeout: float = 10.0, allow_private: bool = True, ca_file: str = ""
) -> object:
    """Runs a job that delivers `BODY` to `url`, and returns what the job returned."""
    outlet = WebhookOutlet(keys=KEYS, timeout=timeout, allow_private=allow_private, ca_file=ca_file)
    work = DeliverWebhook(url=url, recipient="alice", event="order.filled", body=msgspec.Raw(BODY))
    return webhook_job(outlet).run(work, JobContext("delivery-7", 2, 9, lambda _value: None))
