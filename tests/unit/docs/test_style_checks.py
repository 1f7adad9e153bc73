"""The checks of names and phrases report what they are for."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parents[3] / ".ci"


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("def load():\n    found = 1", [(2, "found")]),
        ("def load(wanted): ...", [(1, "wanted")]),
        ("names = [one.name for one in rows]", [(1, "one")]),
        ("class View:\n    found: int = 0", []),
        ("class View:\n    def load(self):\n        left = 1", [(3, "left")]),
        ("class View:\n    async def load(self):\n        left = 1", [(3, "left")]),
        ("from orders import messages as om", [(1, "messages as om")]),
        ("from hypothesis import strategies as st", []),
    ],
)
def test_a_local_name_that_says_nothing_is_refused(
    source: str, faults: list[tuple[int, str]]
) -> None:
    find_faults = runpy.run_path(str(CHECKS / "check_names.py"))["find_faults"]
    assert list(find_faults(ast.parse(source))) == faults


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("local kind, left = 1, 2", [(1, "left")]),
        ("\nlocal w = redis.call('GET', KEYS[1])", [(2, "w")]),
        ("local MOST = 1000  -- calls", [(1, "MOST")]),
        ("local function read(key, wanted)", [(1, "wanted")]),
        ("for _, one in ipairs(jobs) do", [(1, "one")]),
        ("-- local left = 1", []),
        ("local rings_left = redis.call('LLEN', left)", []),
        ("local P, META", []),
        ("for n = 1, #KEYS do", []),
    ],
)
def test_a_local_name_of_lua_that_says_nothing_is_refused(
    source: str, faults: list[tuple[int, str]]
) -> None:
    find_lua_faults = runpy.run_path(str(CHECKS / "check_names.py"))["find_lua_faults"]
    assert list(find_lua_faults(source)) == faults


@pytest.mark.parametrize(
    "text",
    [
        "What counts for him.",
        "He runs a worker.",
        "It waits 5 s at the most.",
        "It is told that",
        "It runs beside the session.",
        "The worker goes on.",
    ],
)
def test_a_phrase_that_was_translated_word_by_word_is_refused(text: str) -> None:
    find_faults = runpy.run_path(str(CHECKS / "check_phrases.py"))["find_faults"]
    assert len(find_faults(text)) >= 1
    assert find_faults("It waits at most 5 s.") == []


@pytest.mark.parametrize(
    "text",
    [
        "berth bench beside ../before",
        "from bench import beside, suite",
        'if workflow.patched("a step goes on in the next run"):',
    ],
)
def test_names_that_contain_a_refused_word_are_let_through(text: str) -> None:
    find_faults = runpy.run_path(str(CHECKS / "check_phrases.py"))["find_faults"]
    assert find_faults(text) == []
