"""Checks the repository's rules: imports between layers, links, paths, script headers."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worker_runtime.protocol import scripts

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("worker_runtime", "workflows", "activities", "api", "infra", "tests")
SCRIPTS = ROOT / "worker_runtime" / "protocol" / "lua"


def _files() -> list[Path]:
    """Returns the files that git knows or would add; without git (an image, an archive), all files
    of the tree."""
    git = shutil.which("git")
    listed = git and subprocess.run(
        [git, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed and listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for room in (*ROOMS, "docs") for path in (ROOT / room).rglob("*")]
        paths += list(ROOT.glob("*.*"))
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


@pytest.mark.timeout(120)
def test_the_arrows_between_the_rooms_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


#: Where SQL still stands outside of `infra/database`. This list may only become shorter. The checks
#: of `berth doctor` and backups ask PostgreSQL about itself.
SQL_ELSEWHERE = {
    "infra/doctor/checks.py",
    "infra/doctor/measures.py",
    "infra/doctor/servers.py",
    "infra/jobs/applications.py",
    "infra/jobs/registry.py",
    "infra/recovery/backup.py",
    "infra/recovery/restore.py",
}


def _makes_statements(path: Path) -> bool:
    """Returns True if a module imports of SQLAlchemy more than connections and errors."""
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            root, _, part = node.module.partition(".")
            if root == "sqlalchemy" and part not in ("exc", "ext.asyncio"):
                return True
        if isinstance(node, ast.Import) and any(
            name.name.partition(".")[0] == "sqlalchemy" for name in node.names
        ):
            return True
    return False


def test_sql_is_in_the_database_layer() -> None:
    outside = {
        path.relative_to(ROOT).as_posix()
        for room in ("api", "activities", "workflows", "worker_runtime", "infra")
        for path in (ROOT / room).rglob("*.py")
        if _makes_statements(path)
    }
    layer = ("infra/database/", "infra/lab/")
    assert {path for path in outside if not path.startswith(layer)} == SQL_ELSEWHERE


def test_relative_links_of_the_documents_resolve() -> None:
    broken = []
    for document in (path for path in _files() if path.suffix == ".md"):
        prose = re.sub(r"```.*?```", "", _text(document), flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            if not (document.parent / target.partition("#")[0]).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []


def test_nothing_names_a_path_of_a_machine() -> None:
    words = [rf"/{home}/[a-z_][a-z0-9_-]*/" for home in ("home", "Users", "work")]
    pattern = re.compile("|".join([*words, "/" + "root/", re.escape(str(ROOT)) + r"\b"]))
    faults = []
    for path in _files():
        faults += [f"{path.relative_to(ROOT)}: {hit}" for hit in pattern.findall(_text(path))]
    assert faults == []


def test_no_file_collects_what_found_no_home() -> None:
    homeless = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    names = [path for path in _files() if path.suffix == ".py" and path.stem in homeless]
    assert names == []


#: Parts whose users see no other part, and so may use a word in their own sense: distributions, and
#: the paper exchange with its messages, which simulates somebody else's program.
NAMESPACES = {
    "infra/berth_jobs": "berth_jobs",
    "tests/unit/berth_jobs": "berth_jobs",
    "infra/berth_testing": "berth_testing",
    "infra/client": "berth_client",
    "infra/exchange": "exchange",
    "worker_runtime/brokers/paper/wire.py": "exchange",
}


def _namespace(path: str) -> str:
    return next((name for start, name in NAMESPACES.items() if path.startswith(start)), "berth")


def test_a_class_name_is_used_once_in_each_namespace() -> None:
    """A search for a class finds one definition. Classes within classes count, too."""
    definitions: dict[tuple[str, str], list[str]] = {}
    for path in (path for path in _files() if path.suffix == ".py"):
        relative = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, ast.ClassDef):
                definitions.setdefault((_namespace(relative), node.name), []).append(relative)
    assert {name: places for (_, name), places in definitions.items() if len(places) > 1} == {}


def test_every_lua_script_is_loaded() -> None:
    assert {script.name for script in scripts.ALL} == {path.stem for path in SCRIPTS.rglob("*.lua")}


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.lua")), ids=lambda path: path.stem)
def test_a_lua_script_opens_with_its_table_of_keys_and_arguments(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    head = re.match(r"(?:#!lua flags=.*\n)?(?:--.*\n)+", source)
    assert head, "no comment at the top"
    code = source[head.end() :]
    for kind in ("KEYS", "ARGV"):
        explained = {int(n) for n in re.findall(rf"^-- {kind}\[(\d+)", head[0], re.M)}
        open_ended = re.search(rf"^-- {kind}\[\d+…\]", head[0], re.M)
        used = {int(n) for n in re.findall(rf"{kind}\[(\d+)\]", code)}
        assert used <= explained, f"{kind}{sorted(used - explained)} is not explained"
        assert explained == used or open_ended, (
            f"{kind}{sorted(explained - used)} is explained, not used"
        )


def test_nobody_runs_workflows_in_the_default_sandbox() -> None:
    """There a finalizer of redis-py on a workflow's thread would load hiredis anew:
    workflows/sandbox.py."""
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("activities/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Worker", "Replayer")
        and {keyword.arg for keyword in node.keywords} & {"workflows", "workflow_runner"}
        == {"workflows"}
    ]
    assert without == []
