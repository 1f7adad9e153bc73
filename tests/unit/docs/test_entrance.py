"""AGENTS.md, the page "Where is what", the docstrings of packages and the pages `reading-*.md` say
what is in the source."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
AGENTS = ROOT / "AGENTS.md"
WHERE_IS_WHAT = ROOT / "docs" / "how-it-works" / "where-is-what.md"
#: Pages whose code is copied from the source.
READING = sorted((ROOT / "docs" / "how-it-works").glob("reading-*.md"))
PRODUCT = ("activities", "api", "infra", "worker_runtime", "workflows")
#: A page of the entrance is read in one go.
MAX_AGENTS_LINES = 100
#: ```` ```python title="path/to/file.py: Class.method" ````; scripts may leave the name out.
SNIPPET = re.compile(
    r'^```(?P<language>\w+) title="(?P<title>[^"]+)"\n(?P<code>.*?)^```$', re.M | re.S
)
CODE = re.compile(r"^```(?:python|lua|sql)\b(?! title=)", re.M)


def _packages(*folders: str) -> Iterator[tuple[str, str]]:
    """Yields the path of each package and its docstring."""
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("__init__.py")):
            module = ast.parse(file.read_text(encoding="utf-8"))
            yield str(file.parent.relative_to(ROOT)), ast.get_docstring(module) or ""


def _paths_in(text: str) -> set[str]:
    """Returns what is written as `code` and looks like a path of this repository."""
    words = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return {
        word
        for word in words
        if re.fullmatch(r"\.?[\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:md|toml|yml)", word)
    }


def _missing_paths(text: str) -> set[str]:
    return {path for path in _paths_in(text) if not (ROOT / path).exists()}


def _python_lines(source: str, name: str) -> list[str] | None:
    """Returns the lines of a function, class or constant, such as `Class.method`; None if there is
    none."""
    scope: ast.AST = ast.parse(source)
    for part in name.split("."):
        for node in ast.iter_child_nodes(scope):
            if getattr(node, "name", "") == part:
                break
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            if any(isinstance(target, ast.Name) and target.id == part for target in targets):
                break
        else:
            return None
        scope = node
    first = min(
        [scope.lineno, *(decorator.lineno for decorator in getattr(scope, "decorator_list", ()))]  # type: ignore[attr-defined]
    )
    return source.splitlines()[first - 1 : scope.end_lineno]  # type: ignore[attr-defined]


def _lua_lines(source: str, name: str) -> list[str] | None:
    """Returns the lines of a local function."""
    pattern = rf"^([ ]*)local function {re.escape(name)}\(.*?^\1end$"
    match = re.search(pattern, source, re.M | re.S)
    return match[0].splitlines() if match else None


def _is_within(snippet: list[str], lines: list[str]) -> bool:
    """Returns True if the snippet is a run of consecutive lines, however far these are indented."""
    expected = textwrap.dedent("\n".join(snippet))
    starts = range(len(lines) - len(snippet) + 1)
    return any(
        textwrap.dedent("\n".join(lines[at : at + len(snippet)])) == expected for at in starts
    )


def find_fault(title: str, code: str, root: Path = ROOT) -> str:
    """Returns what is wrong with a snippet, or '' if the source has exactly these lines."""
    path, _, name = title.partition(": ")
    if not (root / path).is_file():
        return f"{path} does not exist"
    source = (root / path).read_text(encoding="utf-8")
    lines: list[str] | None = source.splitlines()
    if name:
        lines = _lua_lines(source, name) if path.endswith(".lua") else _python_lines(source, name)
    if lines is None:
        return f"{path} has no {name}"
    if not _is_within(code.splitlines(), lines):
        return f"{path}: {name} has changed; its snippet begins {code.splitlines()[0].strip()!r}"
    return ""


# --- AGENTS.md ------------------------------------------------------------------------------------


def test_agents_md_is_short_enough_to_be_read() -> None:
    assert len(AGENTS.read_text(encoding="utf-8").splitlines()) <= MAX_AGENTS_LINES


def test_agents_md_leads_to_the_longer_page() -> None:
    path = str(WHERE_IS_WHAT.relative_to(ROOT))
    assert f"]({path})" in AGENTS.read_text(encoding="utf-8")


indexes = pytest.mark.parametrize("page", [AGENTS, WHERE_IS_WHAT], ids=lambda page: page.stem)


@indexes
def test_every_path_that_an_index_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(_paths_in(text)) > 30
    assert _missing_paths(text) == set()


@indexes
def test_every_name_that_an_index_gives_after_a_python_file_is_defined_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)", text)
    assert len(named) > 10
    undefined = [
        f"{path}: {name}"
        for path, names in named
        for name in re.findall(r"`([\w.]+)`", names)
        if _python_lines((ROOT / path).read_text(encoding="utf-8"), name) is None
    ]
    assert undefined == []


SECURITY = ROOT / "docs" / "how-it-works" / "security.md"


def test_every_test_that_the_page_of_security_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECURITY.read_text(encoding="utf-8"))
    assert len(named) > 100
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert missing == []


# --- packages -------------------------------------------------------------------------------------


def test_every_package_has_a_docstring() -> None:
    assert [name for name, text in _packages(*PRODUCT, "tests") if not text] == []


def test_every_package_of_the_product_says_what_is_not_in_it() -> None:
    assert [name for name, text in _packages(*PRODUCT) if "\n\nNot here: " not in text] == []


def test_docstrings_of_packages_name_paths_that_exist() -> None:
    missing = {name: _missing_paths(text) for name, text in _packages(*PRODUCT, "tests")}
    assert {name: paths for name, paths in missing.items() if paths} == {}


# --- pages that read the source -------------------------------------------------------------------

reading = pytest.mark.parametrize("page", READING, ids=lambda page: page.stem)


def test_there_is_a_page_for_an_order_a_cut_off_and_the_job_queue() -> None:
    assert [page.stem for page in READING] == [
        "reading-a-cut-off",
        "reading-an-order",
        "reading-the-job-queue",
    ]


@reading
def test_every_snippet_is_in_the_source_as_it_is(page: Path) -> None:
    snippets = [match.groupdict() for match in SNIPPET.finditer(page.read_text(encoding="utf-8"))]
    assert len(snippets) > (20 if page.stem == "reading-an-order" else 4)
    faults = [find_fault(snippet["title"], snippet["code"]) for snippet in snippets]
    assert [fault for fault in faults if fault] == []


@reading
def test_all_code_of_the_page_is_compared_with_the_source(page: Path) -> None:
    assert CODE.findall(page.read_text(encoding="utf-8")) == []


@reading
def test_every_path_that_the_page_names_exists(page: Path) -> None:
    assert _missing_paths(page.read_text(encoding="utf-8")) == set()


_SOURCE = """\
LIMIT = 3

class Queue:
    def push(self, item):
        check(item)
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""


@pytest.mark.parametrize(
    ("title", "code", "fault"),
    [
        ("queue.py: Queue.push", "check(item)\nself.items.append(item)\n", ""),
        ("queue.py: Queue.push", "def push(self, item):\n    check(item)\n", ""),
        ("queue.py: LIMIT", "LIMIT = 3\n", ""),
        ("queue.py", "class Queue:\n    def push(self, item):\n", ""),
        ("queue.py: Queue.pop", "check(item)\n", "queue.py: Queue.pop has changed"),
        ("queue.py: Queue.push", "check(item)\n\nself.items\n", "queue.py: Queue.push has changed"),
        ("queue.py: Queue.clear", "self.items.clear()\n", "queue.py has no Queue.clear"),
        ("stack.py: Stack.push", "check(item)\n", "stack.py does not exist"),
    ],
)
def test_a_snippet_whose_source_changed_is_reported_with_the_name_of_its_file(
    tmp_path: Path, title: str, code: str, fault: str
) -> None:
    (tmp_path / "queue.py").write_text(_SOURCE, encoding="utf-8")
    reported = find_fault(title, code, tmp_path)
    assert reported.startswith(fault) if fault else reported == ""


def test_a_snippet_of_a_lua_function_ends_with_that_function(tmp_path: Path) -> None:
    source = "local function ring()\n  if empty then\n    push()\n  end\nend\n\npush()\n"
    (tmp_path / "bell.lua").write_text(source, encoding="utf-8")
    assert find_fault("bell.lua: ring", "  push()\nend\n", tmp_path) == ""
    assert (
        find_fault("bell.lua: ring", "push()\n\npush()\n", tmp_path)
        == "bell.lua: ring has changed; its snippet begins 'push()'"
    )
    assert find_fault("bell.lua", "push()\n", tmp_path) == ""
