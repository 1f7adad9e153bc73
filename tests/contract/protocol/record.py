"""`python -m tests.contract.protocol.record RELEASE`: keeps the messages of this release for later
ones.

To be run at a release. The files of earlier releases stay as they are: workers, API processes and
orchestrators of those releases may run beside newer ones. Their trees are recorded by this script,
too, with the old tree first on `PYTHONPATH`.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.support import message_shapes
from worker_runtime.protocol import errors, keys

FOLDER = Path(__file__).parent / "releases"


def messages_of(
    key: str, one: type[msgspec.Struct], known: dict[str, message_shapes.Shape]
) -> list[str]:
    """Bytes as this release writes them: its own code decodes each sample and encodes it again."""
    found = []
    for sample in message_shapes.samples(key, known):
        written = msgspec.json.encode(
            msgspec.json.decode(msgspec.json.encode(sample), type=one)
        ).decode()
        if written not in found:
            found.append(written)
    return found


def key_names() -> dict[str, str]:
    """Every key of Valkey, with `a`, `b` … for its parts."""
    found = {}
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if function.__module__ == keys.__name__ and not name.startswith("_"):
            parameters = list(inspect.signature(function).parameters.values())
            given: list[Any] = [
                number + 1 if "int" in str(one.annotation) else "abcdef"[number]
                for number, one in enumerate(parameters)
            ]
            found[name] = str(function(*given))
    return found


def error_codes() -> dict[str, bool]:
    """Code → whether a caller may try again."""
    return {
        one.code: one.retryable
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.BerthError)
    }


def recorded() -> dict[str, Any]:
    found = message_shapes.structs()
    known = {name: message_shapes.described(one) for name, one in found.items()}
    return {
        "structs": {
            name: known[name] | {"messages": messages_of(name, one, known)}
            for name, one in found.items()
        },
        "dataclasses": {
            name: message_shapes.described_dataclass(one)
            for name, one in message_shapes.dataclasses().items()
        },
        "keys": key_names(),
        "errors": error_codes(),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{sys.argv[1]}.json"
    path.write_text(json.dumps(recorded(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
