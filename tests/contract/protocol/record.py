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
    key: str, cls: type[msgspec.Struct], known: dict[str, message_shapes.Shape]
) -> list[str]:
    """Bytes as this release writes them: its own code decodes each sample and encodes it again."""
    encoded_samples = []
    for sample in message_shapes.samples(key, known):
        written = msgspec.json.encode(
            msgspec.json.decode(msgspec.json.encode(sample), type=cls)
        ).decode()
        if written not in encoded_samples:
            encoded_samples.append(written)
    return encoded_samples


def key_names() -> dict[str, str]:
    """Every key of Valkey, with `a`, `b` … for its parts."""
    names = {}
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if function.__module__ == keys.__name__ and not name.startswith("_"):
            parameters = list(inspect.signature(function).parameters.values())
            given: list[Any] = [
                number + 1 if "int" in str(parameter.annotation) else "abcdef"[number]
                for number, parameter in enumerate(parameters)
            ]
            names[name] = str(function(*given))
    return names


def error_codes() -> dict[str, bool]:
    """Code → whether a caller may try again."""
    return {
        cls.code: cls.retryable
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.BerthError)
    }


def recorded() -> dict[str, Any]:
    structs = message_shapes.structs()
    known = {name: message_shapes.described(cls) for name, cls in structs.items()}
    return {
        "structs": {
            name: known[name] | {"messages": messages_of(name, cls, known)}
            for name, cls in structs.items()
        },
        "dataclasses": {
            name: message_shapes.described_dataclass(cls)
            for name, cls in message_shapes.dataclasses().items()
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
