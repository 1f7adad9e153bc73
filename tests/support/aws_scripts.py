"""Runs scripts of CloudFormation templates in a real shell."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.support.aws_templates import text_of


def text_without_references(value: Any) -> str:
    """Returns a script of a template, with a word in place of each reference."""
    return re.sub(r"\$\{[\w:.-]+\}", "reference", text_of(value))


class ScriptRun:
    """Runs a script with programs that note how they were called. `/etc` is a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs, self.etc = folder / "programs", folder / "etc"
        self.programs.mkdir(parents=True)
        (self.etc / "ecs").mkdir(parents=True)
        self._calls = folder / "calls"
        self._calls.touch()

    def program(self, name: str, body: str = "") -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self._calls}\n{body}\n')
        path.chmod(0o755)

    def run(self, shell: str, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shell, "-c", script.replace("/etc/", f"{self.etc}/")],
            env={"PATH": f"{self.programs}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self, name: str) -> list[str]:
        return [
            line for line in self._calls.read_text().splitlines() if line.partition(" ")[0] == name
        ]
