"""The Lua scripts. Each is loaded once and begins with its table of KEYS and ARGV."""

from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Script:
    """Holds a script's source, and the SHA-1 under which a server knows it (EVALSHA)."""

    name: str
    source: str
    sha: str

    @classmethod
    def of(cls, name: str, *files: Path) -> Self:
        """Makes the script of these files, one after the other."""
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        return cls(name, source, sha1(source.encode(), usedforsecurity=False).hexdigest())


_FOLDER = Path(__file__).parent


def _load(path: str, library: str = "") -> Script:
    """Loads the script of this path; `library` is loaded before it."""
    shared = [_FOLDER / f"{library}.lua"] if library else []
    return Script.of(path.partition("/")[2], *shared, _FOLDER / "lua" / f"{path}.lua")


ENQUEUE = _load("requests/enqueue", "memory_lib")
WITHDRAW = _load("requests/withdraw")
RESOLVE_OVERDUE = _load("requests/resolve_overdue")
RING_DOORBELL = _load("requests/ring_doorbell")
SEND_CONTROL = _load("requests/send_control")
POP = _load("requests/pop")
PUT_BACK = _load("requests/put_back")
ANSWER = _load("requests/answer")
RENEW_MARK = _load("workers/renew_mark")
READ_BOUNDED = _load("workers/read_bounded")
REMOVE_MARK = _load("workers/remove_mark")
SET_OWNER = _load("workers/set_owner")
PUMP_EVENTS = _load("workers/pump_events")
MEASURE_NAMES = _load("workers/measure_names", "writer_lib")
NAME_USERS = _load("workers/name_users", "writer_lib")
KEEP_ORDERS = _load("workers/keep_orders")
REMOVE_NAMES = _load("workers/remove_names", "writer_lib")
WRITE_SWITCH = _load("workers/write_switch")
ANNOUNCE_WORKER = _load("workers/announce_worker")
ADMIT_WORKER = _load("workers/admit_worker")
CLAIM = _load("workers/claim", "memory_lib")
SETTLE_CLAIM = _load("workers/settle_claim")
DISCARD_ENTRY = _load("workers/discard_entry")
JOIN_WAIT_QUEUE = _load("workers/join_wait_queue")
RETIRE_WORKER = _load("workers/retire_worker")
SPEND_BUDGET = _load("limits/spend_budget")
TAKE_CONNECTION = _load("limits/take_connection")
RENEW_CONNECTIONS = _load("limits/renew_connections")
NOTE_CUT_OFF = _load("limits/note_cut_off")
NOTE_PAUSE = _load("limits/note_pause")
SPEND_REQUESTS = _load("limits/spend_requests")
TAKE_LAUNCH = _load("workers/take_launch")

ALL = tuple(script for script in list(globals().values()) if isinstance(script, Script))
