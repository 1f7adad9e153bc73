"""`berth up` shows its progress on a terminal and in a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO

import msgspec
import pytest
import typer
from rich.console import Console

from infra.cli import stack
from infra.cli.app import app
from infra.cli.main_job import MainJobResult
from infra.client.models import OrderHistory
from infra.local.steps import StepProgress, StepStatus

RESULT = MainJobResult(
    "the-key",
    msgspec.convert(
        {
            "id": "o-1",
            "client_order_id": "demo-1",
            "side": "buy",
            "quantity": 1,
            "symbol": "2330",
            "user_id": "demo",
            "account_id": "demo-account",
            "price_type": "MKT",
            "price": None,
            "time_in_force": "IOC",
            "state": "filled",
            "final": True,
            "broker_order_id": "P-1",
            "filled_quantity": 1,
            "code": None,
            "reason": None,
            "accepted_at": "2026-01-02T03:04:05Z",
            "average_price": "600.5",
            "timeline": [
                {"step": "accepted", "at": "2026-01-02T03:04:05Z", "elapsed_ms": 0.0},
                {"step": "filled", "at": "2026-01-02T03:04:06Z", "elapsed_ms": 41.26},
            ],
        },
        OrderHistory,
    ),
    0.0412,
)


def _console(terminal: bool) -> tuple[Console, StringIO]:
    written = StringIO()
    return Console(force_terminal=terminal, file=written, width=100, color_system=None), written


def _frames(written: StringIO) -> str:
    """Returns what was written, without the codes that move the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())


def _row(text: str, title: str) -> str:
    """Returns the last drawn row of a step."""
    return [line for line in text.splitlines() if title in line][-1]


def test_a_terminal_shows_each_step_with_its_sign_its_time_and_its_detail() -> None:
    console, written = _console(terminal=True)
    view = stack.ProgressView(console)
    with view.drawing:
        view.show(StepProgress("valkey", StepStatus.STARTED))
        view.show(StepProgress("postgres", StepStatus.STARTED))
        view.show(StepProgress("temporal", StepStatus.STARTED))
        view.show(StepProgress("valkey", StepStatus.DONE, 0.34, "port 6379"))
        view.show(StepProgress("postgres", StepStatus.FAILED, 2.1, "postgres: no space [/] left"))
    text = _frames(written)
    assert re.search(r"✓ +Valkey +0\.3 s +port 6379", _row(text, "Valkey"))
    assert re.search(
        r"✗ +PostgreSQL +2\.1 s +postgres: no space \[/\] left", _row(text, "PostgreSQL")
    )
    started = _row(text, "Temporal")
    assert "✓" not in started
    assert "✗" not in started
    assert " s " not in started
    assert [line.split()[1] for line in text.splitlines()[-3:]] == [
        "Valkey",
        "PostgreSQL",
        "Temporal",
    ]


def test_a_pipe_gets_one_plain_line_for_each_step_that_ended() -> None:
    console, written = _console(terminal=False)
    view = stack.ProgressView(console)
    with view.drawing:
        view.show(StepProgress("valkey", StepStatus.STARTED))
        view.show(StepProgress("valkey", StepStatus.DONE, 0.34, "port 6379"))
        view.show(StepProgress("pool", StepStatus.FAILED, 60.0))
    first, second = written.getvalue().splitlines()
    assert first.split() == ["ready", "Valkey", "0.3", "s", "(port", "6379)"]
    assert second.split() == ["FAILED", "pool", "of", "warm", "workers", "60.0", "s"]


def test_a_terminal_shows_the_orders_steps_as_a_table() -> None:
    console, written = _console(terminal=True)
    stack.show_job(console, RESULT)
    text = _frames(written)
    assert "Order demo-1 of user demo: buy 1 2330 is filled at 600.5 after 41 ms over REST" in text
    assert "ms since accepted" in text
    assert re.search(r"│ filled +│ 2026-01-02T03:04:06\.000000Z │ +41\.3 │", text)


def test_a_pipe_gets_the_orders_steps_as_lines() -> None:
    console, written = _console(terminal=False)
    stack.show_job(console, RESULT)
    assert [line.split() for line in written.getvalue().splitlines()[-2:]] == [
        ["accepted", "0.0", "ms"],
        ["filled", "41.3", "ms"],
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_users_key_is_not_part_of_what_the_job_shows(terminal: bool) -> None:
    console, written = _console(terminal)
    stack.show_job(console, RESULT)
    assert RESULT.api_key not in written.getvalue()


def _commands(group: typer.Typer) -> Iterator[typer.models.CommandInfo]:
    yield from group.registered_commands
    for below in group.registered_groups:
        if below.typer_instance is not None:
            yield from _commands(below.typer_instance)


def test_the_help_of_every_command_leaves_line_breaks_to_the_terminal() -> None:
    commands = list(_commands(app))

    paragraphs = [text for command in commands for text in (command.help or "").split("\n\n")]

    assert len(paragraphs) > len(commands) > 80
    assert [text for text in paragraphs if "\n" in text or not text] == []
