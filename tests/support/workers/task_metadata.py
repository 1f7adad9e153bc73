"""ECS's metadata endpoint, as a container sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec

TASK_ID = "c13b4cb40f1f4fe4a2971f76ae5a47ad"
_ARN = f"arn:aws:ecs:ap-northeast-1:123456789012:task/berth/{TASK_ID}"


@contextmanager
def metadata_server(refusals: int = 0) -> Iterator[str]:
    """Its base address. The first answers may be refusals, as when it starts late."""
    refusals_left = [None] * refusals

    class MetadataHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if refusals_left:
                refusals_left.pop()
                self.send_error(404)
                return
            assert self.path == "/v4/0f3c/task"
            body = msgspec.json.encode(
                {"Cluster": "berth", "TaskARN": _ARN, "Family": "berth-worker"}
            )
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), MetadataHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v4/0f3c"
        server.shutdown()
        thread.join()
