"""Refuses local names that say nothing, in Python and in Lua. `make check` runs it.

It also refuses module aliases of one or two letters. A reader who meets `found` or `one` has to
look for the line that filled it. Fields and keyword arguments of messages are not local: they are
stored, so they stay.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("api", "activities", "workflows", "worker_runtime", "infra", "tests")
FORBIDDEN = frozenset(
    {"found", "left", "more", "most", "one", "so", "some", "wanted", "what", "who"}
)
#: What follows `local`, `for` or `function f(` in Lua, up to what ends the names.
LUA_NAMES = re.compile(r"\b(?:local(?! function)|for|function[^(]*\()([^=)]*?)(?:=|\bin\b|\)|$)")
#: Aliases that the libraries' own documentation uses.
KNOWN_ALIASES = frozenset({"s3", "st"})
#: Folders and files that still have such names. This list may only become shorter: the check
#: refuses an entry that has none left.
TO_DO: tuple[str, ...] = ()


def find_faults(tree: ast.AST, *, in_class: bool = False) -> Iterator[tuple[int, str]]:
    """Yields line and name of each forbidden local name or short alias."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in FORBIDDEN and not in_class:
                yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in FORBIDDEN:
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name in FORBIDDEN:
            yield node.lineno, str(node.name)
        elif isinstance(node, ast.alias) and _is_short(node.asname):
            yield node.lineno, f"{node.name} as {node.asname}"
        is_class, is_function = (
            isinstance(node, ast.ClassDef),
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
        )
        yield from find_faults(node, in_class=is_class or (in_class and not is_function))


def find_lua_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yields line and name of each forbidden local name or parameter, and of locals of one small
    letter."""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split("--")[0]
        for declaration in LUA_NAMES.finditer(code):
            for name in re.findall(r"\w+", declaration[1]):
                is_short = len(name) == 1 and name.islower() and declaration[0].startswith("local")
                if name.lower() in FORBIDDEN or is_short:
                    yield number, name


def _is_short(alias: str | None) -> bool:
    return alias is not None and len(alias) <= 2 and alias not in KNOWN_ALIASES


def main() -> int:
    faults, unfinished = [], set()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")):
        if path.suffix not in (".py", ".lua") or path.is_symlink():
            continue
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        named = find_lua_faults(text) if path.suffix == ".lua" else find_faults(ast.parse(text))
        faults_here = [f"{name}:{line}: {fault}" for line, fault in named]
        entry = next((entry for entry in TO_DO if f"{name}/".startswith(f"{entry}/")), None)
        if entry is None:
            faults += faults_here
        elif faults_here:
            unfinished.add(entry)
    for fault in faults:
        print(f"{fault}: name the thing instead (.ci/check_names.py)")
    clean = sorted(set(TO_DO) - unfinished)
    for entry in clean:
        print(
            f"{entry} has no forbidden names any more: remove it from TO_DO in .ci/check_names.py"
        )
    return 1 if faults or clean else 0


if __name__ == "__main__":
    sys.exit(main())
