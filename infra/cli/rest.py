"""The command line's way to the REST API:
with an operator's key from a file, errors as one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.client.calls import ApiReply, url_path
from infra.client.client import BerthClient
from infra.client.errors import ApiError, BerthClientError, Unreachable
from infra.client.events import StreamEvent
from infra.local.folder import DataFolder
from infra.settings import Settings, read_settings
from infra.vault import key_file
from infra.vault.key_file import KeyFileMissing
from worker_runtime.protocol.errors import BerthError

#: Most rows of a request; every list of the API gives as many.
MAX_ROWS_PER_REQUEST = 500


class ApiRefused(BerthError, code="REFUSED"):
    """The API refused the request."""


class NoApi(BerthError, code="NO_API"):
    """The API's address or its key is unknown."""


@dataclass(frozen=True)
class ApiAddress:
    """Where the API is, and the file that holds the key for it."""

    url: str
    key_path: Path
    #: Data folder of the local system; None for another API.
    data: Path | None = None

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
    """Finds the API that the options or the environment name, else the running `berth up` of the
    data folder.

    Raises `NoApi`.
    """
    if url is None and key_path is None and (given := read_settings(Settings)).api_url:
        url, key_path = given.api_url, given.api_key_file
    if url is not None and key_path is not None:
        return ApiAddress(url.rstrip("/"), key_path)
    folder = DataFolder(data)
    api_url, _ = folder.addresses()
    if not api_url:
        raise NoApi(
            f"no `berth up` is ready in {folder.path}: start it, name its folder with --data, "
            "or say where the API is with --url and --key-file"
        )
    return ApiAddress(api_url, folder.keys / "admin.key", folder.path)


class OperatorApi:
    """The operations that commands use, by the parts of a path; `open_api` makes it."""

    def __init__(self, client: BerthClient, address: ApiAddress) -> None:
        self.client = client
        self._address = address

    def local_data(self) -> Path:
        """Returns the data folder of the local system. Raises `NoApi` when the API is another
        one."""
        if self._address.data is None:
            raise NoApi("the paper exchange is a part of the local system: leave out --url")
        return self._address.data

    def get(self, /, *path: str, **query: Any) -> Any:
        return self.client.request("GET", url_path(*path), query=query).body

    def rows(
        self, *path: str, name: str, limit: int, **query: Any
    ) -> tuple[list[dict[str, Any]], bool]:
        """Returns at most `limit` rows of the list `name`, read in pages; and whether there are
        more."""
        rows: list[dict[str, Any]] = []
        cursor = None
        while len(rows) < limit:
            part = self.get(
                *path, **query, limit=min(limit - len(rows), MAX_ROWS_PER_REQUEST), cursor=cursor
            )
            rows += part[name]
            cursor = part["next_cursor"]
            if not cursor:
                break
        return rows, bool(cursor)

    def post(self, /, *path: str, wait: float | None = None, **given: Any) -> ApiReply:
        """Sends a POST. `wait` is the seconds that the API itself may wait for the outcome; the
        rest is the body."""
        body = {name: value for name, value in given.items() if value is not None}
        return self.client.request("POST", url_path(*path), body=body, wait=wait)

    def put(self, /, *path: str, **body: Any) -> ApiReply:
        return self.client.request("PUT", url_path(*path), body=body)

    def patch(self, /, *path: str, **body: Any) -> ApiReply:
        return self.client.request("PATCH", url_path(*path), body=body)

    def delete(self, /, *path: str, **query: Any) -> ApiReply:
        return self.client.request("DELETE", url_path(*path), query=query)

    def events(self, *path: str, after: int) -> Iterator[StreamEvent[dict[str, Any]]]:
        """Yields each event behind the id `after`, endlessly."""
        return self.client.follow(url_path(*path), after)


@contextmanager
def open_api(address: ApiAddress) -> Iterator[OperatorApi]:
    """Opens the API. Inside, what goes wrong is raised as `ApiRefused`, a sentence for people.
    Raises as `key` does, too."""
    try:
        client = BerthClient(address.url, address.key())
    except ValueError as error:
        raise NoApi(str(error)) from None
    with client:
        try:
            yield OperatorApi(client, address)
        except Unreachable as error:
            down = address.data is not None and not error.sent
            hint = " (does `berth up` run well? look at its output)" if down else ""
            raise ApiRefused(f"{error}{hint}") from None
        except BerthClientError as error:
            unknown_key = isinstance(error, ApiError) and error.status == 401
            known = f"the API does not know the key in {address.key_path}"
            raise ApiRefused(known if unknown_key else str(error)) from None
