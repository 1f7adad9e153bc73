"""Decrypts payloads for Temporal's web UI and the `temporal` command:
Temporal's remote codec protocol.

Its address contains a token that follows from the codec's key: who can read the key file can have
the address, and nobody else can use the server, whatever reaches its port. Browsers let only pages
of the UI's own origins read an answer.

It decrypts whatever workflow a payload was made for, because nobody tells it which one is shown. It
encrypts only at an address that ends with a workflow's id; only that workflow can read it. A
payload that cannot be decrypted is shown as it is, so that one bad signal hides nothing else.
"""

import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, Depends, FastAPI, Header, HTTPException
from fastapi.middleware.cors import CORSMiddleware
from google.protobuf import json_format
from temporalio.api.common.v1 import Payload, Payloads

from infra.settings import Settings
from infra.temporal.codec import PayloadEncryption, PayloadNotDecrypted, PayloadScope
from infra.vault.secret_versions import SecretVersion, SecretVersionFile
from worker_runtime.protocol.authentication import derive_key


def token_of(version: SecretVersion) -> str:
    """Returns the token in the address; another one with each version of the key."""
    return derive_key(version.secret, b"berth/codec-server/1").hex()[:32]


def create_codec_app(keys: SecretVersionFile, origins: Sequence[str]) -> FastAPI:
    """Creates the codec's application. Tokens of earlier versions count, too, while these are in
    the file."""
    app = FastAPI(title="Berth: codec", openapi_url=None)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["POST"],
        allow_headers=["content-type", "x-namespace", "authorization"],
    )
    codec = PayloadEncryption(keys)

    def admit(token: str) -> None:
        if not any(
            [hmac.compare_digest(token.encode(), token_of(key).encode()) for key in keys.present()]
        ):
            raise HTTPException(404)

    @app.post("/{token}/encode", dependencies=[Depends(admit)])
    async def encode(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        return body  # the `temporal` command asks before each query, also of nothing

    @app.post("/{token}/{workflow_id}/encode", dependencies=[Depends(admit)])
    async def encode_for(
        workflow_id: str,
        body: Annotated[dict[str, Any], Body()],
        namespace: Annotated[str, Header(alias="x-namespace")] = "default",
    ) -> dict[str, Any]:
        scope = PayloadScope.of_workflow(namespace, workflow_id)
        encrypted = await codec.with_scope(scope).encode(_payloads(body))
        return json_format.MessageToDict(Payloads(payloads=encrypted))

    @app.post("/{token}/decode", dependencies=[Depends(admit)])
    @app.post("/{token}/{workflow_id}/decode", dependencies=[Depends(admit)])
    async def decode(body: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
        shown = [_decrypted(codec, payload) for payload in _payloads(body)]
        return json_format.MessageToDict(Payloads(payloads=shown))

    return app


def _payloads(body: dict[str, Any]) -> Sequence[Payload]:
    try:
        return json_format.ParseDict(body, Payloads()).payloads
    except json_format.ParseError:
        raise HTTPException(400, "not a list of payloads") from None


def _decrypted(codec: PayloadEncryption, payload: Payload) -> Payload:
    try:
        return codec.decrypt(payload)
    except PayloadNotDecrypted:
        return payload


def serve(settings: Settings, *, host: str, port: int, origins: Sequence[str]) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises what `SecretVersionFile` does."""
    app = create_codec_app(SecretVersionFile(Path(settings.temporal_codec_key_file)), origins)
    # Without an access log: the token stands in each line of it.
    uvicorn.run(
        app, host=host, port=port, access_log=False, log_level="warning", server_header=False
    )


def address(settings: Settings, host: str, port: int) -> str:
    """Returns what to enter as the codec's endpoint. Raises what `SecretVersionFile` does."""
    newest = SecretVersionFile(Path(settings.temporal_codec_key_file)).present()[0]
    return f"http://{host}:{port}/{token_of(newest)}"
