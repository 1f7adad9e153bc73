from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from worker_runtime.process.mark import WorkerMark
from worker_runtime.process.shared_state import SharedState
from worker_runtime.process.valkey import Argument, Valkey
from worker_runtime.protocol.launch import WorkerConfig
from worker_runtime.protocol.scripts import Script

OLD = bytes(range(32))
CONFIG = WorkerConfig(
    worker_id="w",
    pool="p",
    valkey_url="redis://127.0.0.1:1/0",
    launch_token=b"t" * 32,
    orchestrator_keys=(b"k" * 32,),
)


class RecordingValkey(Valkey):
    """Keeps the messages that it gets."""

    def __init__(self) -> None:
        super().__init__(CONFIG.valkey_url)
        self.fields: dict[Any, Any] = {}

    def run(self, script: Script, key_names: Sequence[str], args: Sequence[Argument]) -> Any:
        self.fields = dict(zip(args[3::2], args[4::2], strict=True))
        return b"ok"

    def execute(self, *command: Argument) -> Any:
        assert command == ("TIME",)
        return [b"0", b"0"]


class Replaced(SharedState):
    """Its session is replaced when the key has been read."""

    def public_key(self) -> bytes:
        key = super().public_key()
        self.session_number += 1
        return key


class Numbers:
    """The shared state's numbers; `at_read` is called when the session's is read for the second
    time."""

    def __init__(self, numbers: Any, index: int, at_read: Callable[[], None]) -> None:
        self._numbers = numbers
        self._index = index
        self._at_read = at_read
        self._reads = 0

    def __getitem__(self, index: int) -> int:
        self._reads += index == self._index
        if index == self._index and self._reads == 2:
            self._at_read()
        return int(self._numbers[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._numbers[index] = value


def test_the_key_of_a_session_that_was_replaced_meanwhile_is_not_shown_as_its_successors() -> None:
    shared_state, client = Replaced(), RecordingValkey()
    shared_state.session_number = 1
    shared_state.publish_key(OLD)
    shared_state.assign("u", "c", 1)
    WorkerMark(CONFIG, shared_state).renew(client)
    assert (client.fields["session"], client.fields["public_key"]) == (1, OLD.hex())


def test_a_key_that_may_have_been_written_over_while_it_was_read_is_none() -> None:
    shared_state = SharedState()
    shared_state.session_number = 1
    shared_state.publish_key(OLD)
    numbers: Any = shared_state.numbers

    def replace() -> None:
        numbers[1] = 2

    shared_state.numbers = Numbers(numbers, 1, replace)  # type: ignore[assignment]
    assert shared_state.public_key() == b""
    shared_state.numbers = numbers
