"""The page on adding a broker is followed: its files are written, installed, and pass the contract
suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.brokers.example import ROOT, install, write_example


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="module")
def installed(project: Path) -> Path:
    target = project.parent / "installed"
    install(target, project, ROOT / "infra" / "berth_testing")
    return target


def run(
    installed: Path, *command: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{installed}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_its_record_is_found_without_importing_it(installed: Path) -> None:
    program = (
        "import sys; from worker_runtime.protocol import installed_brokers as found;"
        "plugin = found.installed_brokers()['harbour'];"
        "print(found.announced_brokers(), plugin.record.markets['spot'].currency, "
        "plugin.distribution);"
        "print([name for name in sys.modules if name.startswith('berth_harbour')])"
    )
    done = run(installed, "-c", program)
    assert done.returncode == 0, done.stderr
    words, imported = done.stdout.splitlines()
    assert words == "harbour=1@berth-harbour-0.1.0 paper=3 shioaji=3 EUR berth-harbour"
    assert imported == "[]"


def test_its_own_polls_and_the_limit_of_its_record_fit_what_the_broker_takes(
    installed: Path,
) -> None:
    program = (
        "from berth_harbour import adapter, exchange\n"
        "from worker_runtime.protocol.installed_brokers import installed_brokers\n"
        "limits = installed_brokers()['harbour'].record.limits\n"
        "polls = limits.connections * 5 / adapter.POLL_S\n"
        "assert polls + limits.queries_per_5s <= exchange.QUERIES_PER_5S, polls\n"
    )
    done = run(installed, "-c", program)
    assert done.returncode == 0, done.stderr


def test_a_session_ends_with_an_event_that_its_adapter_cannot_read(installed: Path) -> None:
    program = (
        "import time\n"
        "from berth_harbour import adapter, exchange\n"
        "from worker_runtime.brokers.port import ConnectionKey, Credentials\n"
        "harbour = exchange.Harbour()\n"
        "harbour.keys['a1'] = 'key', 'secret'\n"
        "port = exchange.serve(harbour).server_address[1]\n"
        "key = ConnectionKey('harbour', 'spot', True, 'a1')\n"
        "options = {'simulation_address': f'127.0.0.1:{port}'}\n"
        "session = adapter.open_session(key, 'test', print, options)\n"
        "session.login(Credentials(api_key='key', secret_key='secret'), 5.0)\n"
        "assert session.alive()\n"
        "harbour.events.append(('a1', {'number': 1, 'order': {'state': 'paused'}, 'fill': None}))\n"
        "until = time.monotonic() + 30\n"
        "while session.alive():\n"
        "    assert time.monotonic() < until\n"
        "    time.sleep(0.05)\n"
    )
    done = run(installed, "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(180)
def test_it_passes_the_contract_suite(installed: Path, project: Path) -> None:
    done = run(
        installed,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(project),
        "tests",
        cwd=project,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def run_changed(
    installed: Path, project: Path, folder: Path, test: str, *changes: tuple[str, str, str]
) -> subprocess.CompletedProcess[str]:
    """Run one test of the suite on a copy of the example; a change is a file, its text and the new
    one."""
    copy = shutil.copytree(project, folder / "project")
    for name, written, instead in changes:
        path = copy / name
        text = path.read_text(encoding="utf-8")
        assert written in text
        path.write_text(text.replace(written, instead, 1), encoding="utf-8")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test]
    command += ["--rootdir", str(copy), "tests"]
    return run(installed, *command, cwd=copy)  # whose folders come first on the path


def test_a_broker_without_fok_passes_the_suite(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    refuse = '    if terms["time_in_force"] == "FOK":\n        return "there is no FOK"\n'
    done = run_changed(
        installed,
        project,
        tmp_path,
        "may_not_rest",
        (
            "berth_harbour/exchange.py",
            '    price = terms["price"]\n',
            refuse + '    price = terms["price"]\n',
        ),
        (
            "tests/conftest.py",
            "market_time_in_force=TimeInForce.IOC",
            "times_in_force=(TimeInForce.ROD, TimeInForce.IOC)",
        ),
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


#: The adapter sends a call again whose answer was lost.
REPEATS = (
    "berth_harbour/adapter.py",
    "            status, answer = self._request(method, path, timeout, body)\n"
    "        except NotSent as error:\n",
    "            try:\n"
    "                status, answer = self._request(method, path, timeout, body)\n"
    "            except NO_ANSWER:\n"
    "                status, answer = self._request(method, path, timeout, body)\n"
    "        except NotSent as error:\n",
)


@pytest.mark.parametrize(
    ("test", "change"),
    [
        ("lost_change and silence", REPEATS),
        ("lost_cancel and drop", REPEATS),
        (
            "lost_change and drop",
            (
                "berth_harbour/adapter.py",
                "            raise OutcomeUnknown(self._down) from None\n",
                '            kind = SessionDown if method != "POST" else OutcomeUnknown\n'
                "            raise kind(self._down) from None\n",
            ),
        ),
        (
            "system_that_its_key_names",
            (
                "berth_harbour/adapter.py",
                'name = "simulation_address" if key.simulation else "address"',
                'name = "simulation_address"',
            ),
        ),
    ],
    ids=["repeats a change", "repeats a cancel", "takes a change for unsent", "ignores the system"],
)
def test_the_suite_finds_an_adapter_that_does_too_much(
    installed: Path, project: Path, tmp_path: Path, test: str, change: tuple[str, str, str]
) -> None:
    done = run_changed(installed, project, tmp_path, test, change)
    assert done.returncode == 1, done.stdout
    assert "1 failed" in done.stdout


def test_a_broker_whose_sessions_list_their_own_orders_passes_the_suite(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    done = run_changed(
        installed,
        project,
        tmp_path,
        "test_a_new_session_sees or submitted_once",
        (
            "berth_harbour/exchange.py",
            'return {"orders": [row for row in harbour.orders if row["account"] == account]}',
            'return {"orders": []}',
        ),
        (
            "tests/conftest.py",
            "market_time_in_force=TimeInForce.IOC,",
            "market_time_in_force=TimeInForce.IOC,\n        all_sessions=False,",
        ),
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_broker_that_changes_no_quantities_passes_the_suite(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    done = run_changed(
        installed,
        project,
        tmp_path,
        "gets_smaller or neither_cancelled",
        (
            "berth_harbour/adapter.py",
            '        changes = {"quantity": quantity,',
            '        assert quantity is None\n        changes = {"quantity": quantity,',
        ),
        (
            "tests/conftest.py",
            "market_time_in_force=TimeInForce.IOC,",
            "market_time_in_force=TimeInForce.IOC,\n"
            "        quantity_change=QuantityChange.UNSUPPORTED,",
        ),
        (
            "tests/conftest.py",
            "from worker_runtime.brokers.port import (\n",
            "from worker_runtime.protocol.broker_record import QuantityChange\n"
            "from worker_runtime.brokers.port import (\n",
        ),
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_stage_without_a_fault_is_told_which_one(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    done = run_changed(
        installed,
        project,
        tmp_path,
        "lost_cancel and drop",
        ("tests/conftest.py", "def drop_next_change(", "def drop_next_cancel("),
    )
    assert done.returncode == 1, done.stdout
    assert "HarbourStage has no `drop_next_change`, which this test needs" in done.stdout


@pytest.mark.parametrize(
    ("written", "instead"),
    [('"id": f"H{', '"id": f"{70 * \'H\'}{'), ("time.time_ns() // 1_000_000", "int(time.time())")],
    ids=["an id of 70 characters", "a time in seconds"],
)
def test_the_suite_finds_what_no_message_of_berth_carries(
    installed: Path, project: Path, tmp_path: Path, written: str, instead: str
) -> None:
    done = run_changed(
        installed,
        project,
        tmp_path,
        "fits_into_berths_messages",
        ("berth_harbour/exchange.py", written, instead),
    )
    assert done.returncode == 1, done.stdout
    assert "ValidationError" in done.stdout


@pytest.mark.parametrize(
    ("written", "instead", "sentence"),
    [
        ("schema = 1", "schema = 9", "schema is 9"),
        ('name = "harbour"', 'name = "harbor"', "its entry point 'harbour'"),
        ('name = "harbour"', 'name = "paper"', "paper"),
        (
            'zone = "Europe/Lisbon"',
            'zone = "Europe/Lisboa"',
            "broker harbour cannot be used: markets.spot.zone is 'Europe/Lisboa'",
        ),
    ],
)
def test_a_worker_and_the_api_refuse_a_broken_record_at_their_start(
    installed: Path, tmp_path: Path, written: str, instead: str, sentence: str
) -> None:
    broken = tmp_path / "installed"
    shutil.copytree(installed, broken)
    record = broken / "berth_harbour" / "broker.toml"
    record.write_text(
        record.read_text(encoding="utf-8").replace(written, instead, 1), encoding="utf-8"
    )
    done = run(broken, "-c", "from infra.market.calendar import load_calendar; load_calendar()")
    assert "BrokerRecordRefused" in done.stderr
    assert sentence in done.stderr
