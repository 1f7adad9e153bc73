"""`berth up` as a developer uses it: as a process of its own, stopped by signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from infra.local.process import HOST, accepts
from tests.support.systems.processes import processes_of, wait_nothing_left

BERTH = str(Path(sys.executable).with_name("berth"))
#: A start takes 3 s on 2 idle cores, the main job under 1 s.
PATIENCE = 90
#: From a user without a worker to a fill, on every run.
FULL_WAY = ["accepted", "claimed", "connected", "submitted", "filled"]

pytestmark = pytest.mark.timeout(240)


class Up:
    """One `berth up`; its output is read line by line."""

    def __init__(
        self, environment: dict[str, str], log: Path, *words: str, runner: Sequence[str] = ()
    ) -> None:
        """`runner`: a program that runs it, such as `nohup`."""
        self.log = log
        # A stray `api` in the current folder must not be taken for ours.
        stray = log.parent / "elsewhere" / "api"
        stray.mkdir(parents=True, exist_ok=True)
        (stray / "__init__.py").write_text("raise SystemExit('the api of another project ran')\n")
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*runner, BERTH, "up", "--pool", "1", *words],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=stray.parent,
            )

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while words not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)


@pytest.fixture
def run_up(port_environment: dict[str, str], short_directory: Path) -> Iterator[list[Up]]:
    started: list[Up] = []
    yield started
    for up in started:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)
    subprocess.run([BERTH, "down", "--quiet"], env=port_environment, check=False)


@pytest.mark.slow
def test_one_folder_lives_through_the_main_job_a_second_up_a_crash_and_the_main_job_again(
    folder: Path, port_environment: dict[str, str], short_directory: Path, run_up: list[Up]
) -> None:
    """One test, because each start takes seconds and each part needs what the one before left."""
    for number in range(2):
        once = Up(port_environment, short_directory / f"once{number}.log", "--main-job", "--once")
        run_up.append(once)
        assert once.process.wait(PATIENCE) == 0, once.text()
        steps = re.findall(r"^ +(\w+) +[\d.]+ ms", once.text(), re.MULTILINE)
        assert [step for step in steps if step in FULL_WAY] == FULL_WAY
        assert "of user demo: buy 1 2330 is filled" in once.text()
        wait_nothing_left(folder)
        key = folder / "keys" / "demo.key"
        assert re.fullmatch(r"berth_\S+\n", key.read_text())
        key.write_text("no key\n")  # another one is made

    up = Up(port_environment, short_directory / "up.log")
    run_up.append(up)
    up.wait_for("Ctrl-C stops everything")
    second = subprocess.run(
        [BERTH, "up"], env=port_environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"pid {up.process.pid}" in second.stderr
    assert up.process.poll() is None

    assert up.end(signal.SIGKILL) == -signal.SIGKILL
    again = Up(port_environment, short_directory / "again.log", "--main-job")
    run_up.append(again)
    again.wait_for("Ctrl-C stops everything")
    assert "is filled" in again.text()
    assert "X-API-Key" in again.text()
    [exchange] = [
        pid for pid in psutil.pids() if "infra.exchange" in _command(pid) and _belongs(pid, folder)
    ]
    os.kill(exchange, signal.SIGKILL)
    again.wait_for("exchange has ended; starting it again")
    assert again.end(signal.SIGINT) == 0, again.text()
    wait_nothing_left(folder)


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_api_whose_processes_keep_dying_is_started_again_with_the_cause(
    folder: Path, port_environment: dict[str, str], short_directory: Path, run_up: list[Up]
) -> None:
    up = Up(port_environment | {"BERTH_API_PROCESSES": "2"}, short_directory / "up.log")
    run_up.append(up)
    up.wait_for("Ctrl-C stops everything")
    key, kept = folder / "keys" / "api.key", short_directory / "api.key"
    key.rename(kept)
    [master] = [
        pid for pid in psutil.pids() if _command(pid).endswith("-m api") and _belongs(pid, folder)
    ]
    for process in psutil.Process(master).children():
        process.kill()
    # Three rounds of starts, with pauses between them.
    up.wait_for("api has ended; starting it again (exit code 1; ", 4 * PATIENCE)
    assert "api_gave_up" in up.text()
    assert "5 processes of the API in a row ended before they served" in up.text()
    assert "KeyFileMissing" in up.text()
    up.wait_for("api has not come up")
    kept.rename(key)
    port = int(port_environment["BERTH_API_PORT"])
    deadline = time.monotonic() + 2 * PATIENCE
    while not accepts(port):
        assert up.process.poll() is None, up.text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert up.end(signal.SIGINT) == 0, up.text()
    wait_nothing_left(folder)


@pytest.mark.slow
def test_down_stops_a_running_up_and_ends_what_a_killed_one_left(
    folder: Path, port_environment: dict[str, str], short_directory: Path, run_up: list[Up]
) -> None:
    up = Up(port_environment, short_directory / "up.log", runner=["nohup"])
    run_up.append(up)
    up.wait_for("Ctrl-C stops everything")
    up.process.send_signal(signal.SIGHUP)  # its terminal is closed
    halt = [BERTH, "halt", "--all", "--reason", "a bad morning"]
    subprocess.run(halt, env=port_environment, check=True)
    _down(port_environment, "stopped `berth up`")
    assert up.process.wait(PATIENCE) == 0
    wait_nothing_left(folder)

    # Nothing trades, so the demo order is refused: the system stays up, and says how to go on.
    killed = Up(port_environment, short_directory / "killed.log", "--main-job")
    run_up.append(killed)
    killed.wait_for("Ctrl-C stops everything")
    assert "the demo order failed: TRADING_HALTED: everybody is halted by " in killed.text()
    assert ": a bad morning; cancels still pass" in killed.text()
    assert "`berth open --all --reason …`" in killed.text()
    killed.end(signal.SIGKILL)
    assert any("worker_runtime" in line for line in processes_of(folder))
    _down(port_environment, "1 workers")
    wait_nothing_left(folder)
    _down(port_environment, "nothing runs")


def test_a_port_in_use_ends_up_with_the_port_and_its_setting_and_starts_nothing(
    folder: Path, port_environment: dict[str, str]
) -> None:
    with socket.socket() as other:
        other.bind((HOST, int(port_environment["BERTH_LOCAL_POSTGRES_PORT"])))
        other.listen()
        done = subprocess.run(
            [BERTH, "up"], env=port_environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert port_environment["BERTH_LOCAL_POSTGRES_PORT"] in done.stderr
    assert "BERTH_LOCAL_POSTGRES_PORT" in done.stderr
    assert "Traceback" not in done.stderr
    wait_nothing_left(folder)


@pytest.mark.drill
def test_a_start_that_is_interrupted_leaves_nothing_behind(
    folder: Path, port_environment: dict[str, str], short_directory: Path, run_up: list[Up]
) -> None:
    # Nobody launches workers, so that the start does not end before it is interrupted.
    environment = port_environment | {"BERTH_TASK_QUEUES": '["lifecycle"]'}
    up = Up(environment, short_directory / "up.log")
    run_up.append(up)
    up.wait_for("Valkey")
    assert up.end(signal.SIGTERM) == 130, up.text()
    wait_nothing_left(folder)


def test_a_folder_that_holds_something_else_is_refused_without_a_traceback(
    folder: Path, port_environment: dict[str, str]
) -> None:
    folder.mkdir()
    (folder / "holiday.jpg").touch()
    done = subprocess.run(
        [BERTH, "up"], env=port_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "holiday.jpg" in done.stderr
    assert "Traceback" not in done.stderr


def _down(environment: dict[str, str], expected: str) -> None:
    done = subprocess.run(
        [BERTH, "down"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _belongs(pid: int, folder: Path) -> bool:
    return any(line.startswith(f"{pid} ") for line in processes_of(folder))
