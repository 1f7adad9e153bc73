"""Pushes by Firebase Cloud Messaging, HTTP v1.

A service account logs in by a JWT that it signs (RFC 7523). The access token is kept in the child
process, so a fleet of pushes wants children that run several jobs (`BERTH_JOBS_RECYCLE`).
"""

import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from worker_runtime.jobs.config import PushOutlet
from worker_runtime.jobs.protocol.catalog import SendPush
from worker_runtime.jobs.types.job_type import JobContext
from worker_runtime.jobs.types.message import (
    MessageDeferred,
    ProviderLoginRefused,
    ProviderRequest,
    post,
)

_SCOPE = "https://www.googleapis.com/auth/firebase.messaging"
_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
#: Seconds that a login is asked for, and before its end at which a new one is made.
_LOGIN_LIFETIME_S, _RENEW_MARGIN_S = 3600, 300.0


class _FcmError(msgspec.Struct):
    """`{"code": 404, "status": "NOT_FOUND", "details": [{"@type": …, "errorCode":
    "UNREGISTERED"}]}`"""

    status: str = ""
    details: list[dict[str, Any]] = []


class FcmProvider:
    arguments = SendPush

    def __init__(self, outlet: PushOutlet) -> None:
        self.outlet = outlet
        self._token, self._valid_until = "", 0.0

    def request(self, message: Any, context: JobContext) -> ProviderRequest:
        """Raises `MessageDeferred`, `MessageRefused`, `ProviderLoginRefused`."""
        # A repeat has the same tag, and so replaces the first one.
        tag = sha256(context.job_id.encode()).hexdigest()[:32]
        body = {
            "message": {
                "token": message.token,
                "notification": {"title": message.title, "body": message.text},
                "data": message.data,
                "android": {"notification": {"tag": tag}},
                "apns": {"headers": {"apns-collapse-id": tag}},
                "webpush": {"notification": {"tag": tag}},
            }
        }
        project = quote(self.outlet.project_id, safe="")
        return ProviderRequest(
            f"{self.outlet.url.rstrip('/')}/v1/projects/{project}/messages:send",
            {"Authorization": f"Bearer {self._login()}", "Content-Type": "application/json"},
            msgspec.json.encode(body),
        )

    def message_id(self, answer: Mapping[str, Any]) -> str:
        return str(answer.get("name", ""))

    def error_code(self, answer: Mapping[str, Any]) -> str:
        try:
            error = msgspec.convert(answer.get("error"), _FcmError)
        except msgspec.ValidationError:
            return ""
        return next(
            (str(detail["errorCode"]) for detail in error.details if "errorCode" in detail),
            error.status,
        )

    def _login(self) -> str:
        if time.monotonic() < self._valid_until:
            return self._token
        form = {"grant_type": _GRANT, "assertion": self._assertion()}
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        request = ProviderRequest(self.outlet.token_uri, headers, urlencode(form).encode())
        status, answer, retry_after = post(request, self.outlet, repeatable=True)
        token, life = answer.get("access_token"), answer.get("expires_in")
        if status == 200 and isinstance(token, str) and isinstance(life, int):
            self._token, self._valid_until = token, time.monotonic() + life - _RENEW_MARGIN_S
            return token
        if status == 429 or status >= 500:
            raise MessageDeferred(f"the login: status {status}", retry_after=retry_after)
        raise ProviderLoginRefused(f"the login: status {status}")

    def _assertion(self) -> str:
        """Raises `ProviderLoginRefused` for a key that is none."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(self.outlet.private_key.encode(), None)
        except (ValueError, TypeError):  # their texts may quote it
            key = None
        if not isinstance(key, rsa.RSAPrivateKey):
            raise ProviderLoginRefused("the service account's key is no RSA key in PEM")
        now = int(time.time())
        ends = {"iat": now, "exp": now + _LOGIN_LIFETIME_S}
        claims = {
            "iss": self.outlet.client_email,
            "scope": _SCOPE,
            "aud": self.outlet.token_uri,
            **ends,
        }
        signed = b".".join(
            _base64(msgspec.json.encode(part)) for part in ({"alg": "RS256", "typ": "JWT"}, claims)
        )
        return (
            signed + b"." + _base64(key.sign(signed, padding.PKCS1v15(), hashes.SHA256()))
        ).decode()


def _base64(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")
