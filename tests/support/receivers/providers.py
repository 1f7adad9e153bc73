"""Servers on this machine that answer as the documents of Twilio's Messages API and of FCM's HTTP
v1 say.

`faults`: what the next requests get instead, by turns: (status, headers, body), or None for a
connection that is closed without an answer.
"""

import json
import threading
import time
from base64 import b64decode, urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

Answer = tuple[int, dict[str, str], Any]
ACCOUNT, TOKEN = "AC" + "0" * 32, "a secret token"
PROJECT, ROBOT = "berth-app", "push@berth-app.iam.gserviceaccount.com"


class ProviderServer(ThreadingHTTPServer):
    """Keeps what it got: (path, headers, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ProviderHandler)
        self.faults: list[Answer | None] = []
        #: Seconds that each answer takes.
        self.latency = 0.0
        self.got: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle."""


class TwilioServer(ProviderServer):
    """Knows one account. 20003, 21211, 21212 and 63016 are Twilio's codes."""

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        login = b64decode(headers.get("Authorization", "").removeprefix("Basic ")).decode()
        if login != f"{ACCOUNT}:{TOKEN}" or path != f"/2010-04-01/Accounts/{ACCOUNT}/Messages.json":
            return self.error(401, 20003)
        form = {
            name: values[0] for name, values in parse_qs(body.decode(), strict_parsing=True).items()
        }
        number = form["To"].removeprefix("whatsapp:")
        if not number.startswith("+") or number.endswith("0000"):
            return self.error(400, 21211)
        if "From" not in form and "MessagingServiceSid" not in form:
            return self.error(400, 21212)
        if form["To"] != number and "Body" in form and form["Body"] == "too late":
            return self.error(400, 63016)
        made = {
            "sid": f"SM{len(self.got):032x}",
            "status": "queued",
            "error_code": None,
            "to": form["To"],
        }
        return 201, {}, made

    def error(self, status: int, code: int) -> Answer:
        about = f"https://www.twilio.com/docs/errors/{code}"
        text = "The 'To' number +886912340000 is not a valid phone number."
        return status, {}, {"code": code, "message": text, "more_info": about, "status": status}


class FcmServer(ProviderServer):
    """Knows one service account, by its public key, and one project; takes JWTs and access
    tokens."""

    def __init__(self, public_key: rsa.RSAPublicKey) -> None:
        super().__init__()
        self._public_key = public_key
        self.valid: set[str] = set()

    @property
    def logins(self) -> int:
        return sum(path == "/token" for path, _, _ in self.got)

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if path == "/token":
            return self._login(
                {name: values[0] for name, values in parse_qs(body.decode()).items()}
            )
        if headers.get("Authorization", "").removeprefix("Bearer ") not in self.valid:
            return self.error(401, "UNAUTHENTICATED", None)
        if path != f"/v1/projects/{PROJECT}/messages:send":
            return self.error(404, "NOT_FOUND", None)
        message = json.loads(body)["message"]
        if message["token"] == "gone":
            return self.error(404, "NOT_FOUND", "UNREGISTERED")
        if message["token"] == "of another project":
            return self.error(403, "PERMISSION_DENIED", "SENDER_ID_MISMATCH")
        if not all(isinstance(value, str) for value in message["data"].values()):
            return self.error(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT")
        return 200, {}, {"name": f"projects/{PROJECT}/messages/0:{len(self.got)}"}

    def error(self, status: int, name: str, code: str | None) -> Answer:
        kind = "type.googleapis.com/google.firebase.fcm.v1.FcmError"
        details = [{"@type": "type.googleapis.com/google.rpc.BadRequest"}]
        details += [{"@type": kind, "errorCode": code}] if code else []
        error = {"code": status, "message": "text", "status": name, "details": details}
        return status, {}, {"error": error}

    def _login(self, form: dict[str, str]) -> Answer:
        signed, _, signature = form["assertion"].rpartition(".")
        claims = json.loads(_unpadded(signed.partition(".")[2]))
        try:
            self._public_key.verify(
                _unpadded(signature), signed.encode(), padding.PKCS1v15(), hashes.SHA256()
            )
        except InvalidSignature:
            return (
                400,
                {},
                {"error": "invalid_grant", "error_description": "Invalid JWT Signature."},
            )
        fits = claims["iss"] == ROBOT and claims["aud"] == f"{self.url}/token"
        fits = fits and claims["iat"] - 60 <= time.time() < claims["exp"] <= claims["iat"] + 3600
        if not fits or form["grant_type"] != "urn:ietf:params:oauth:grant-type:jwt-bearer":
            return 400, {}, {"error": "invalid_grant"}
        token = f"ya29.{len(self.valid)}"
        self.valid.add(token)
        return 200, {}, {"access_token": token, "expires_in": 3599, "token_type": "Bearer"}


def _unpadded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


class _ProviderHandler(BaseHTTPRequestHandler):
    server: ProviderServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = dict(self.headers)
        self.server.got.append((self.path, headers, body))
        usual = self.server.answer(self.path, headers, body)
        time.sleep(self.server.latency)
        answer = self.server.faults.pop(0) if self.server.faults else usual
        if answer is None:
            return
        status, extra_headers, said = answer
        data = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in extra_headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the tests' output."""


@contextmanager
def serving(server: ProviderServer) -> Iterator[None]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
