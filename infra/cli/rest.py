"""The command line's client of the REST API: with an operator's key from a file, errors as one sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from infra.local.folder import DataFolder
from infra.vault import key_file
from infra.vault.key_file import KeyFileMissing
from worker_runtime.protocol.errors import BerthError

#: Seconds to connect, and for an answer on top of what a call itself may wait.
CONNECT, ANSWER = 5.0, 10.0
#: Seconds without a byte after which a stream counts as lost; the API sends a comment every 15 s.
STREAM_SILENCE = 45.0
#: Seconds before a lost stream is opened again.
AGAIN = 1.0


class ApiRefused(BerthError):
    """The API refused the request."""

    code = "REFUSED"

    def __init__(self, detail: str = "", status: int = 0) -> None:
        super().__init__(detail)
        #: HTTP status; 0 when there was no answer.
        self.status = status


class NoApi(BerthError):
    """The API's address or its key is unknown."""

    code = "NO_API"


@dataclass(frozen=True)
class ApiAddress:
    """Where the API is, and the file that holds the key for it."""

    url: str
    key_path: Path
    #: What a person should check when no API answers there.
    hint: str = ""

    def key(self) -> str:
        """Raises `NoApi`, or `KeyFileExposed` for a file that others can read."""
        try:
            text = key_file.read_key_file(self.key_path, private=True).decode("ascii").strip()
        except KeyFileMissing:
            raise NoApi(f"{self.key_path} is missing or cannot be read") from None
        except (UnicodeDecodeError, OSError):
            text = ""
        if not text or not text.isprintable() or " " in text:
            raise NoApi(f"{self.key_path} holds no API key")
        return text


def find_api(data: Path, url: str | None, key_path: Path | None) -> ApiAddress:
    """The API that the options name, else the running `berth up` of the data folder. Raises `NoApi`."""
    if url is not None and key_path is not None:
        if not url.startswith(("http://", "https://")):
            raise NoApi(f"{url} is no address of an API; it begins with http:// or https://")
        return ApiAddress(url.rstrip("/"), key_path)
    folder = DataFolder(data)
    found = folder.api_url()
    if found is None:
        raise NoApi(
            f"no `berth up` is ready in {folder.path}: start it, name its folder with --data, "
            "or say where the API is with --url and --key-file"
        )
    return ApiAddress(found, folder.keys / "admin.key", " (does `berth up` run well? look at its output)")


@dataclass(frozen=True)
class ApiReply:
    """A successful answer. `done` is False for 202: the API goes on working on it."""

    done: bool
    body: Any


class OperatorApi:
    """A context manager. Every method raises `ApiRefused` with a sentence for people."""

    def __init__(self, address: ApiAddress, *, again: float = AGAIN) -> None:
        """`again`: seconds before a lost stream is opened again. Raises `NoApi`, `KeyFileExposed`."""
        self._address = address
        self._again = again
        try:
            self._http = httpx.Client(
                base_url=f"{address.url}/v1",
                headers={"X-API-Key": address.key()},
                timeout=httpx.Timeout(ANSWER, connect=CONNECT),
                trust_env=False,  # no proxy from the environment may see the key
            )
        except httpx.InvalidURL as error:
            raise NoApi(f"{address.url} is no address: {error}") from None

    def get(self, path: str, **query: Any) -> Any:
        return self._call("GET", path, query=query).body

    def rows(
        self, path: str, name: str, *, limit: int, page: int, **query: Any
    ) -> tuple[list[dict[str, Any]], bool]:
        """At most `limit` rows, read in pages of `page`; and whether there are more."""
        found: list[dict[str, Any]] = []
        cursor = None
        while len(found) < limit:
            part = self.get(path, **query, limit=min(limit - len(found), page), cursor=cursor)
            found += part[name]
            cursor = part["next_cursor"]
            if not cursor:
                break
        return found, bool(cursor)

    def post(self, path: str, *, wait: float | None = None, **given: Any) -> ApiReply:
        """`wait`: seconds that the API itself may wait for the outcome; the rest is the body."""
        body = {name: value for name, value in given.items() if value is not None}
        query = {} if wait is None else {"wait": wait}
        return self._call("POST", path, query=query, body=body, patience=wait or 0.0)

    def put(self, path: str, body: dict[str, Any]) -> ApiReply:
        return self._call("PUT", path, query={}, body=body)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any],
        body: Any = None,
        patience: float = 0.0,
    ) -> ApiReply:
        given = {name: value for name, value in query.items() if value is not None}
        timeout = httpx.Timeout(ANSWER + patience, connect=CONNECT)
        try:
            answer = self._http.request(method, path, params=given, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        self._check(answer)
        try:
            return ApiReply(answer.status_code != 202, answer.json())
        except ValueError:
            raise ApiRefused(f"what answers at {self._address.url} is no API of Berth") from None

    def events(self, path: str, after: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and data of each event after the id `after`, endlessly; a lost stream is opened again.

        Raises `ApiRefused` when it cannot be opened the first time, or is refused later.
        """
        opened = False
        while True:
            try:
                with self._http.stream(
                    "GET",
                    path,
                    headers={"Last-Event-ID": str(after)},
                    timeout=httpx.Timeout(STREAM_SILENCE, connect=CONNECT),
                ) as answer:
                    if answer.status_code >= 400:
                        answer.read()
                    self._check(answer)
                    opened = True
                    for name, position, data in parse_events(answer.iter_lines()):
                        after = position
                        yield name, data
            except httpx.HTTPError as error:
                if not opened:
                    raise self._unreachable(error) from None
            except ApiRefused as refused:
                if not opened or refused.status < 500:
                    raise
            time.sleep(self._again)

    def _unreachable(self, error: httpx.HTTPError) -> ApiRefused:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return ApiRefused(f"the API at {self._address.url} did not answer in time")
        return ApiRefused(f"no API answers at {self._address.url}{self._address.hint}")

    def _check(self, answer: httpx.Response) -> None:
        if answer.is_success:
            return
        if answer.status_code == 401:
            raise ApiRefused(f"the API does not know the key in {self._address.key_path}", 401)
        try:
            problem = answer.json()
            sentence = f"{problem['code']}: {problem.get('detail') or problem['title']}"
            errors = [f"{one['loc'][-1]}: {one['msg']}" for one in problem.get("errors", [])]
        except (ValueError, KeyError, TypeError, IndexError):
            sentence, errors = f"{self._address.url} answered {answer.status_code}", []
        raise ApiRefused("; ".join([sentence, *errors]), answer.status_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._http.close()


def parse_events(lines: Iterator[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Server-sent events with name, id and JSON data; comments and everything else are skipped."""
    found: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            found[name] = value.removeprefix(" ")
            continue
        if found.get("id", "").isdigit() and "data" in found:
            yield found.get("event", "message"), int(found["id"]), json.loads(found["data"])
        found = {}
