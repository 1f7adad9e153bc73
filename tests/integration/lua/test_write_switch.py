"""A user's key `trading:switch`: never older than it was, never missing when there is an owner."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.lua_scripts import Scripts
from tests.support.message_signing import switch_args, switch_words
from worker_runtime.protocol import keys
from worker_runtime.protocol.requests import OPEN_SWITCH, SwitchState, UserSwitch
from worker_runtime.protocol.scripts import SET_OWNER, WRITE_SWITCH, Script

USER = "42"
_HGETALL = Script("hgetall", "return redis.call('HGETALL', KEYS[1])", "")
HALTED, REDUCING = SwitchState.HALTED, SwitchState.REDUCING


def switch(scripts: Scripts, user_switch: UserSwitch) -> Any:
    return scripts.run(WRITE_SWITCH, [keys.switch(USER)], *switch_args(USER, user_switch))


def own(scripts: Scripts, user_switch: UserSwitch, epoch: int = 1) -> Any:
    return scripts.run(
        SET_OWNER,
        [keys.owner(USER), keys.switch(USER)],
        epoch,
        "w",
        "g",
        *switch_words(USER, user_switch),
    )


def written(scripts: Scripts) -> dict[str, str]:
    words: list[str] = scripts.run(_HGETALL, [keys.switch(USER)])
    fields = dict(zip(words[::2], words[1::2], strict=True))
    assert fields.pop("*mac", "")
    return fields


def test_the_newest_switch_applies_in_whatever_order_they_come(scripts: Scripts) -> None:
    assert switch(scripts, UserSwitch(version=7, every=HALTED)) == "ok"
    assert switch(scripts, UserSwitch(version=6)) == "older"
    assert written(scripts) == {"*version": "7", "*": "halted"}
    assert switch(scripts, UserSwitch(version=7, every=HALTED)) == "ok"
    assert switch(scripts, UserSwitch(version=8, accounts={"main": REDUCING})) == "ok"
    assert written(scripts) == {"*version": "8", "*": "open", "main": "reducing"}


def test_a_switch_that_is_written_to_another_server_has_its_id(scripts: Scripts) -> None:
    assert switch(scripts, UserSwitch(version=7, server="first")) == "ok"
    assert switch(scripts, UserSwitch(version=7, every=HALTED, server="second")) == "ok"
    assert written(scripts) == {"*version": "7", "*": "halted", "*server": "second"}
    assert switch(scripts, UserSwitch(version=6, server="third")) == "older"
    assert written(scripts)["*server"] == "second"
    assert own(scripts, UserSwitch(version=8, server="third")) == "ok"
    assert written(scripts) == {"*version": "8", "*": "open", "*server": "third"}


def test_a_forged_switch_is_overwritten_and_a_newer_one_that_came_since_is_not(
    scripts: Scripts,
) -> None:
    forged = {"*version": "999", "*": "open", "*mac": "forged"}
    scripts.client.hset(keys.switch(USER), mapping=forged)  # type: ignore[arg-type]
    ours = UserSwitch(version=7, every=HALTED)
    assert switch(scripts, ours) == "older"
    assert (
        scripts.run(WRITE_SWITCH, [keys.switch(USER)], *switch_args(USER, ours, "forged")) == "ok"
    )
    assert switch(scripts, UserSwitch(version=8, every=HALTED)) == "ok"
    assert (
        scripts.run(WRITE_SWITCH, [keys.switch(USER)], *switch_args(USER, ours, "forged"))
        == "older"
    )


def test_a_user_may_have_more_switches_than_lua_unpacks(scripts: Scripts) -> None:
    many = UserSwitch(version=1, accounts={f"a{number}": HALTED for number in range(9_000)})
    assert switch(scripts, many) == "ok"
    assert own(scripts, many) == "ok"
    assert scripts.client.hlen(keys.switch(USER)) == 9_003


def test_an_account_that_was_opened_leaves_no_trace(scripts: Scripts) -> None:
    switch(scripts, UserSwitch(version=1, accounts={"a": HALTED, "b": HALTED}))
    switch(scripts, UserSwitch(version=2, accounts={"b": HALTED}))
    assert written(scripts) == {"*version": "2", "*": "open", "b": "halted"}


def test_an_owner_is_never_written_without_a_switch(scripts: Scripts) -> None:
    assert own(scripts, OPEN_SWITCH) == "ok"
    assert written(scripts) == {"*version": "0", "*": "open"}


def test_an_owner_that_comes_with_an_older_switch_keeps_the_newer_one(scripts: Scripts) -> None:
    switch(scripts, UserSwitch(version=9, every=HALTED))
    assert own(scripts, UserSwitch(version=8)) == "ok"
    assert written(scripts) == {"*version": "9", "*": "halted"}
    assert own(scripts, UserSwitch(version=10)) == "ok"
    assert written(scripts) == {"*version": "10", "*": "open"}


def test_an_owner_that_is_refused_changes_no_switch(scripts: Scripts) -> None:
    own(scripts, OPEN_SWITCH, epoch=2)
    assert own(scripts, UserSwitch(version=3, every=HALTED), epoch=1) == "older"
    assert written(scripts) == {"*version": "0", "*": "open"}


@pytest.mark.parametrize(
    ("every", "account", "expected"),
    [("open", "open", "open"), ("open", "halted", "halted"), ("halted", "open", "halted")],
)
def test_the_strictest_state_counts(every: str, account: str, expected: str) -> None:
    switch = UserSwitch(every=SwitchState(every), accounts={"main": SwitchState(account)})
    assert switch.of("main") == expected
    assert switch.of("other") == every
