"""Looks in an adapter's source for what breaks submit-once:
clients that repeat, and calls without a limit.

It reads the syntax only and finds the usual ways; the suite's own tests find the rest by what
leaves the process.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Libraries whose purpose is to call again.
_RETRYING = frozenset(
    {
        "tenacity",
        "backoff",
        "retrying",
        "retry",
        "stamina",
        "aiohttp_retry",
        "httpx_retries",
        "requests_retry",
    }
)
#: Arguments that make a client call again.
_RETRY_ARGUMENTS = frozenset({"retries", "max_retries", "retry", "total_retries"})
#: Functions that wait for ever without `timeout`: by the last two parts of their name.
_NEED_TIMEOUT = frozenset(
    {
        "socket.create_connection",
        "request.urlopen",
        "client.HTTPConnection",
        "client.HTTPSConnection",
        *(f"requests.{method}" for method in ("get", "post", "put", "delete", "patch", "request")),
    }
)


def find_faults(places: Iterable[Path]) -> list[str]:
    """Return a sentence for each fault in these files and folders, with its file and line."""
    return [fault for path in _python_files(places) for fault in _faults_of(path)]


def _python_files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            yield from sorted(place.rglob("*.py"))
        else:
            yield place


def _faults_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            for name in names:
                if name.partition(".")[0] in _RETRYING or name.endswith("util.retry"):
                    yield (
                        f"{where} imports {name}, which repeats calls: an order could be "
                        "submitted twice"
                    )
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node, where)


def _faults_of_call(call: ast.Call, where: str) -> Iterator[str]:
    for argument in call.keywords:
        value = argument.value
        never = isinstance(value, ast.Constant) and value.value in (0, None, False)
        if argument.arg in _RETRY_ARGUMENTS and not never:
            yield f"{where} sets {argument.arg}: the client would repeat a request by itself"
    name = ".".join(ast.unparse(call.func).split(".")[-2:])
    has_timeout = any(argument.arg in ("timeout", None) for argument in call.keywords)
    if name in _NEED_TIMEOUT and not has_timeout and len(call.args) < 3:
        yield f"{where} calls {name} without `timeout`: it could wait for ever"
