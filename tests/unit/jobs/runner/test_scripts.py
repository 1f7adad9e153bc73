"""The scripts of the job queue keep the repository's rule: each opens with its table of KEYS and
ARGV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infra.valkey.job_users import JOB_COMMANDS
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol import scripts as job_scripts

FOLDER = Path(job_scripts.__file__).parent / "lua"
NAMES = sorted(path.stem for path in FOLDER.glob("*.lua"))


def test_every_script_of_the_queue_is_loaded() -> None:
    assert {script.name for script in job_scripts.ALL} == {f"jobs/{name}" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_opens_with_its_table_of_keys_and_arguments(name: str) -> None:
    source = (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    head = re.match(r"(?:--.*\n)+", source)
    assert head
    code = source[head.end() :]
    for kind in ("KEYS", "ARGV"):
        explained = {int(n) for n in re.findall(rf"^-- {kind}\[(\d+)", head[0], re.M)}
        first_open = re.search(rf"^-- {kind}\[(\d+)…\]", head[0], re.M)
        used = {int(n) for n in re.findall(rf"{kind}\[(\d+)\]", code)}
        assert used <= explained
        assert explained - used <= ({int(first_open[1])} if first_open else set())
    assert code.lstrip().startswith("open(KEYS[1])")


def test_what_the_scripts_build_is_in_the_table_of_keys() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.lua"))
    built = {f"jobs:{{tag}}:{kind}" for kind in re.findall(r"P \.\. '([a-z]+)", sources)}
    described = set(re.findall(r"^\| (jobs:\{tag\}:[a-z]+)", job_keys.__doc__ or "", re.M))
    assert built <= described
    # Those that no script builds: the one they are given, and those that others set.
    assert described - built == {f"jobs:{{tag}}:{kind}" for kind in ("meta", "recent", "users")}


def test_all_keys_of_one_tag_share_a_slot() -> None:
    keys = [job_keys.meta("42"), job_keys.job("42", "j"), job_keys.mailbox("42", "r")]
    keys.append(job_keys.doorbell("42"))
    assert {re.search(r"\{(.*?)\}", key)[1] for key in keys} == {"42"}  # type: ignore[index]


def test_the_login_of_a_fleet_may_use_every_command_of_the_scripts() -> None:
    """A script that may not would fail at each claim, and nothing would run."""
    sources = "".join(script.source for script in job_scripts.ALL)
    used = {name.lower() for name in re.findall(r"call\('(\w+)'", sources)}
    assert used - set(JOB_COMMANDS) == set()
