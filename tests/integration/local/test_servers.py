from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest

from infra.local import record
from infra.local.process import (
    HOST,
    PortInUse,
    Server,
    ServerFailed,
    StartAborted,
    accepts,
    free_port,
    free_ports,
)
from infra.local.record import ProcessRecord
from infra.local.servers import PostgresServer, TemporalServer, ValkeyServer


class MuteServer(Server):
    """Runs and never answers."""

    name = "mute"

    def command(self) -> list[str]:
        return ["sleep", "60"]


class BrokenServer(Server):
    """Ends at once with a reason in its log."""

    name = "broken"

    def command(self) -> list[str]:
        return ["sh", "-c", "echo no such luck; exit 3"]


class ParentServer(Server):
    """Answers at once and has a child that ignores its parent's end."""

    name = "parent"

    def command(self) -> list[str]:
        return ["sh", "-c", "(trap '' TERM; exec sleep 60) & exec sleep 60"]

    def answers(self) -> bool:
        return bool(psutil.Process(self.pid).children())


@pytest.mark.parametrize("kind", [ValkeyServer, PostgresServer, TemporalServer])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_starts_again_on_its_data_after_a_stop_and_after_a_crash(
    kind: type[ValkeyServer | PostgresServer | TemporalServer], how: signal.Signals, folder: Path
) -> None:
    server = kind(folder / kind.name).start()
    before = (server.pid, server.port)
    server.restart(how, down=0.1)
    assert server.answers()
    assert server.pid != before[0]
    assert server.port == before[1]
    server.stop(how)
    assert not server.running
    assert not accepts(server.port)


def test_a_restart_that_is_given_up_starts_nothing(folder: Path) -> None:
    server = ValkeyServer(folder).start()
    server.abort.set()
    with pytest.raises(StartAborted):
        server.restart(signal.SIGKILL, down=30.0)
    assert not server.running


def test_temporal_starts_again_with_search_attributes_that_are_registered_already(
    folder: Path,
) -> None:
    for _ in range(2):
        with TemporalServer(folder, search_attributes=("UserId",)) as server:
            assert server.answers()


def test_a_port_in_use_is_named_with_its_holder_and_its_setting(folder: Path) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        server = ValkeyServer(folder, port)
        server.port_setting = "BERTH_LOCAL_VALKEY_PORT"
        with pytest.raises(
            PortInUse, match=f"port {port} .*pid {os.getpid()} .*BERTH_LOCAL_VALKEY_PORT"
        ):
            server.start()
    assert not server.was_started


def test_a_server_that_ends_while_starting_shows_its_log(folder: Path) -> None:
    with pytest.raises(ServerFailed, match="no such luck"):
        BrokenServer(folder).start()


def test_a_start_that_is_given_up_ends_at_once(folder: Path) -> None:
    server = MuteServer(folder)
    threading.Timer(0.2, server.abort.set).start()
    with pytest.raises(StartAborted):
        server.start()
    server.stop()
    assert not server.running


def test_a_server_that_does_not_answer_in_time_is_stopped(folder: Path) -> None:
    server = MuteServer(folder)
    server.start_timeout = 0.2
    server.launch()
    with pytest.raises(ServerFailed, match="did not answer"):
        server.wait_ready()
    assert not server.running


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stopping_a_server_ends_the_processes_it_has_started(
    how: signal.Signals, folder: Path
) -> None:
    server = ParentServer(folder).start()
    [child] = psutil.Process(server.pid).children()
    server.stop(how)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_half_made_postgres_folder_is_made_again(folder: Path) -> None:
    server = PostgresServer(folder, durable=False)
    # initdb writes PG_VERSION last but one; a kill leaves such folders.
    for name in ("data", "data.new"):
        (folder / name / "base").mkdir(parents=True)
    with server:
        assert server.create_database("again").endswith("/again")


def test_a_recorded_process_is_ended_but_a_stranger_with_its_pid_is_not(folder: Path) -> None:
    server = MuteServer(folder)
    server.records = folder / "run"
    server.launch()
    [entry] = record.read_records(folder / "run")
    assert entry.living() == [server.pid]
    stranger = ProcessRecord(entry.name, entry.pid, entry.started - 1, entry.boot)
    assert not stranger.end()
    assert server.running
    other_boot = ProcessRecord(entry.name, entry.pid, entry.started, "another-boot")
    assert not other_boot.end()
    assert server.running
    assert entry.end()
    assert not server.running
    server.stop()
    assert record.read_records(folder / "run") == []


def test_a_record_that_was_cut_short_is_skipped(folder: Path) -> None:
    folder.mkdir()
    (folder / "valkey.json").write_text('{"name": "valk')
    assert record.read_records(folder) == []


def test_free_ports_are_all_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert free_port() > 0
