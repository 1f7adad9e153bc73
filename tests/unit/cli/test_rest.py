"""The CLI's way to the API: errors as one sentence, a stream that is printed, where the API is
found."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from infra.cli import rest, worker
from infra.cli import tables as worker_tables
from infra.cli.app import app
from infra.cli.rest import ApiAddress, NoApi
from infra.local.folder import DataFolder
from infra.vault.key_file import KeyFileExposed


@dataclass
class FakeApi:
    """Gives the answers of a list, one for each request, and keeps what was asked."""

    url: str
    key_file: Path
    answers: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def answer(self, body: Any, status: int = 200) -> None:
        self.answers.append((status, body if isinstance(body, str) else json.dumps(body)))

    def refuse(self, status: int, code: str, detail: str, **members: Any) -> None:
        self.answer({"code": code, "detail": detail, "title": "?", **members}, status)

    def run(self, *words: str) -> tuple[int, str, str]:
        """Returns exit code, standard output and standard error of `berth worker …`."""
        where = ["--url", self.url, "--key-file", str(self.key_file)]
        done = CliRunner().invoke(worker.app, [*words, *where])
        return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeApi]:
    key_file = tmp_path / "operator.key"
    key_file.write_text("berth_canary\n")
    key_file.chmod(0o600)
    api = FakeApi("", key_file)

    class RestHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api.asked.append((self.command, self.path, dict(self.headers)))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = api.answers.pop(0)
            self.send_response(status)
            kind = "text/event-stream" if body.startswith("retry") else "application/json"
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), RestHandler) as server:
        api.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield api
        server.shutdown()
        thread.join()


def test_the_key_of_the_file_goes_into_the_header_and_nowhere_else(fake: FakeApi) -> None:
    fake.answer({"workers": [], "next_cursor": None})
    code, out, err = fake.run("list")
    assert (code, out, err) == (0, "no such worker runs\n", "")
    (_, path, headers) = fake.asked[0]
    assert headers["X-API-Key"] == "berth_canary"
    assert path == "/v1/workers?limit=100"


def test_pages_are_read_until_the_limit(fake: FakeApi) -> None:
    def row(number: int) -> dict[str, Any]:
        started = "2026-11-21T01:00:00Z"
        return {
            "user_id": f"u{number}",
            "state": "Active",
            "worker_id": "w",
            "pool": "p",
            "started_at": started,
        }

    fake.answer({"workers": [row(1), row(2)], "next_cursor": "more="})
    fake.answer({"workers": [row(3)], "next_cursor": "still more"})
    code, out, _ = fake.run("list", "--limit", "3", "--state", "Active", "--user", "u")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["user", "u1", "u2", "u3", "there"]
    assert [path for _, path, _ in fake.asked] == [
        "/v1/workers?state=Active&user_id=u&limit=3",
        "/v1/workers?state=Active&user_id=u&limit=1&cursor=more%3D",
    ]


@pytest.mark.parametrize(
    ("status", "problem", "expected"),
    [
        (
            404,
            {"code": "USER_NOT_FOUND", "detail": "there is no user x"},
            "USER_NOT_FOUND: there is no user x",
        ),
        (
            422,
            {
                "code": "INVALID_REQUEST",
                "detail": "no",
                "errors": [{"loc": ["query", "state"], "msg": "bad"}],
            },
            "INVALID_REQUEST: no; state: bad",
        ),
        (
            503,
            {"code": "TEMPORAL_UNAVAILABLE", "detail": "Temporal \x1b[31mgone"},
            "Temporal  [31mgone",
        ),
        (502, "<html>", "answered 502"),
        (401, {"code": "UNAUTHENTICATED", "detail": "?"}, "does not know the key in"),
        (200, "<html>", "is no API of Berth"),
    ],
)
def test_a_refusal_is_one_line_on_standard_error_and_exit_1(
    fake: FakeApi, status: int, problem: Any, expected: str
) -> None:
    fake.answer(problem, status)
    code, out, err = fake.run("show", "x")
    assert (code, out) == (1, "")
    assert expected in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "canary" not in err


def test_an_api_that_is_not_there_is_one_line(tmp_path: Path, fake: FakeApi) -> None:
    done = CliRunner().invoke(
        worker.app, ["list", "--url", "http://127.0.0.1:1", "--key-file", str(fake.key_file)]
    )
    assert (done.exit_code, done.stderr) == (1, "error: no API answers at http://127.0.0.1:1\n")


@pytest.mark.parametrize(
    "words", [["list", "--url", "http://127.0.0.1:1"], ["show"], ["list", "--limit", "0"]]
)
def test_a_wrong_call_is_exit_2(words: list[str]) -> None:
    assert CliRunner().invoke(worker.app, words).exit_code == 2


def test_what_was_not_done_in_time_is_exit_1_unless_nobody_waits(fake: FakeApi) -> None:
    fake.answer({"user_id": "alice", "signal": "start"}, 202)
    code, out, err = fake.run("start", "alice", "--wait", "5", "--reason", "morning")
    assert (code, out) == (1, "")
    assert "not done within 5 s" in err
    fake.answer({"user_id": "alice", "signal": "reload_credentials"}, 202)
    assert fake.run("reload-credentials", "alice", "--wait", "0") == (
        0,
        "the worker of alice is asked to reload\n",
        "",
    )
    assert [path for _, path, _ in fake.asked] == [
        "/v1/users/alice/worker/start?wait=5.0",
        "/v1/users/alice/worker/reload-credentials?wait=0.0",
    ]


def test_a_redirect_is_reported_as_one(fake: FakeApi) -> None:
    fake.answer("", 307)
    code, _, err = fake.run("show", "")
    assert (code, "redirects elsewhere" in err, "no id empty?" in err) == (1, True, True)


def test_a_user_id_cannot_leave_its_place_in_the_path(fake: FakeApi) -> None:
    fake.refuse(404, "NOT_FOUND", "no")
    fake.run("stop", "a/../b?c")
    assert fake.asked[0][1] == "/v1/users/a%2F..%2Fb%3Fc/worker/stop"


def test_a_followed_timeline_is_printed_until_the_api_refuses_it(fake: FakeApi) -> None:
    row = {
        "id": 4,
        "at": "2026-11-21T01:00:00Z",
        "before": "Connecting",
        "after": "Active",
        "reason": "",
    }
    fake.answer({"transitions": [], "next_after": 3})
    fake.answer(f"retry: 10\n\nevent: transition\ndata: {json.dumps(row)}\nid: 4\n\n")
    fake.refuse(404, "USER_NOT_FOUND", "gone")
    code, out, err = fake.run("timeline", "alice", "--follow", "--json")
    assert (code, json.loads(out), err) == (1, row, "error: USER_NOT_FOUND: gone\n")
    assert [headers.get("Last-Event-ID") for _, _, headers in fake.asked] == [None, "3", "4"]


def test_the_running_system_of_a_folder_is_found(tmp_path: Path) -> None:
    with closing(DataFolder(tmp_path / "data").open()) as folder:
        with pytest.raises(NoApi, match="no `berth up` is ready in"):
            rest.find_api(folder.path, None, None)
        folder.record_api_url("http://127.0.0.1:8123")
        address = rest.find_api(folder.path, None, None)
        assert (address.url, address.key_path) == (
            "http://127.0.0.1:8123",
            folder.keys / "admin.key",
        )
    with pytest.raises(NoApi):  # another program may have the port by now: it must not get the key
        rest.find_api(folder.path, None, None)
    # The note is the last run's.
    with closing(DataFolder(tmp_path / "data").open()), pytest.raises(NoApi):
        rest.find_api(folder.path, None, None)


def test_a_key_file_must_be_private_and_hold_a_key(tmp_path: Path) -> None:
    path = tmp_path / "some.key"
    there = ApiAddress("http://127.0.0.1:1", path)
    with pytest.raises(NoApi, match=r"some\.key is missing"):
        there.key()
    path.write_text("two words\nand lines\n")
    path.chmod(0o644)
    with pytest.raises(KeyFileExposed):
        there.key()
    path.chmod(0o600)
    with pytest.raises(NoApi, match="holds no API key"):
        there.key()


def test_text_from_outside_does_not_steer_the_terminal() -> None:
    assert worker_tables.plain("\x1b[2Jgone\nand\tmore") == " [2Jgone and more"
    assert worker_tables.plain(None) == ""
    assert worker_tables.clock("2026-11-21T09:00:00.5+08:00") == "2026-11-21 01:00:00"
    assert worker_tables.clock("soon") == "soon"


def _shown(**life: Any) -> str:
    lifecycle = {
        "state": "Active",
        "since": "2026-11-21T01:00:00Z",
        "worker_id": "w-1",
        "task_id": "t-1",
        "epoch": 3,
        "attempts": 1,
        "reason": "",
        "next_step": "ends when idle",
        "deadline": "2026-11-21T01:30:00Z",
        "health": "well",
        "health_at": "2026-11-21T01:00:00Z",
        "crashes": 0,
        "last_activity": None,
        **life,
    }
    written = StringIO()
    shown = {
        "user_id": "alice",
        "state": lifecycle["state"],
        "live": True,
        "metadata": {"version": "0.1.0"},
    }
    worker_tables.show_worker(Console(file=written, width=120), {**shown, "lifecycle": lifecycle})
    return written.getvalue()


def test_a_worker_is_shown_with_what_comes_next_and_how_it_is() -> None:
    text = _shown(health="degraded: broker \x1bunreachable", crashes=2)
    assert "Active since 2026-11-21 01:00:00 UTC, attempt 1" in text
    assert "ends when idle, by 2026-11-21 01:30:00 UTC" in text
    assert "degraded: broker  unreachable (2026-11-21 01:00:00 UTC)" in text
    assert "2 in the last minutes" in text


def test_without_a_worker_no_health_is_claimed() -> None:
    text = _shown(state="Parked", worker_id=None, reason="5 crashes in 10 min")
    assert "5 crashes in 10 min" in text
    assert "health" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("accounts store alice main /", "there is no file /"),
        ("accounts store alice main /none.json", "there is no file /none.json"),
        ("accounts store alice main --certificate /none.p12", "there is no file /none.p12"),
        ("audit --hours 1e99", "less than or equal to 1000000"),
        ("codec --port 99999", "less than or equal to 65535"),
        ("doctor none", "none: known are postgresql, valkey"),
        ("jobs info --valkey redis:1", "error: BERTH_VALKEY_URL: String should match pattern"),
        ("orders place alice main buy 1 2330 --lot none", "'intraday_odd'"),
        ("orders place alice main buy 1 2330 --tif none", "'ROD'"),
        ("up --port 99999", "less than or equal to 65535"),
    ],
)
def test_a_wrong_word_is_refused_in_a_sentence_that_helps(words: str, said: str) -> None:
    done = CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit)
    assert said in done.output
