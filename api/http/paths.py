"""Paths of requests: as routes name them, as clients see them, and as logs may show them."""

import re
from uuid import UUID

from starlette.types import Scope

#: Key of a request's scope: `BERTH_API_ROOT_PATH`, in front of every path that an answer names.
ROOT_PATH = "berth.root_path"
#: Characters of a path in logs and problems; the longest of ours has under 300.
MAX_SHOWN_PATH_LENGTH = 500
_SLASHES = re.compile("/{2,}")
_WEBHOOK = re.compile(r"/webhooks/+([^/]+).*", re.IGNORECASE | re.DOTALL)


def local_path(path: str, root_path: str) -> str:
    """Return the path as routes name it: without the root path,
    repeated slashes, and a slash at its end.

    A proxy may pass the root path on or cut it off, and people end addresses with a slash. All of
    these are served: a redirect would repeat a webhook's token, and many senders follow none.
    """
    if "//" in path:
        path = _SLASHES.sub("/", path)
    if root_path and (path == root_path or path.startswith(f"{root_path}/")):
        path = path.removeprefix(root_path)
    return path.rstrip("/") or "/"


def public_path(scope: Scope) -> str:
    """Return the path that the client asked for, as logs and problems may show it: without a
    webhook's token, and cut, as a client may send one of 64 KiB."""
    path = redacted_path(scope.get(ROOT_PATH, "") + scope["path"])
    return path if len(path) <= MAX_SHOWN_PATH_LENGTH else f"{path[:MAX_SHOWN_PATH_LENGTH]}…"


def redacted_path(path: str) -> str:
    """Return a path without a webhook's token, wherever it stands:
    also in an address that does not exist."""
    match = _WEBHOOK.search(path)
    if match is None or _is_webhook_id(match[1]):
        return path
    return f"{path[: match.start(1)]}…"


def _is_webhook_id(text: str) -> bool:
    """Return True for the id by which a user's own route names a webhook; it opens nothing."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True
