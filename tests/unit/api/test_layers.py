"""What stands around the application: ours outermost, and nothing of anybody else's lost."""

from __future__ import annotations

from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from api.middleware import RequestFrame
from infra.settings import Settings


class _Another:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def test_the_frame_of_requests_is_the_outermost_layer(tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path))
    assert isinstance(app.build_middleware_stack(), RequestFrame)


def test_a_layer_that_is_added_stays(tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path))
    app.add_middleware(_Another)
    outermost = app.build_middleware_stack()
    assert isinstance(outermost, _Another)
    assert isinstance(outermost.app, RequestFrame)
