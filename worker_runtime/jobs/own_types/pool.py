"""The runner's side of the fork server and of its children, which run an application's own jobs.

The runner makes both ends of each child's socket and pipe, and passes the child's ends to the fork
server. So a job and its secrets never pass the fork server, and a fork costs the runner no wait.

Nothing here trusts what the fork server says, because it holds the application's code. The runner
never signals a process by an id that the fork server named. It asks the fork server to signal a
child, and kills the fork server if the child does not end. The children die with the fork server.
Processes that they leave behind become children of the runner, which kills them.

Where the runner may make cgroups, each child has one with a limit of memory. A child gets its first
job once it is in there.
"""

import binascii
import contextlib
import errno
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from berth_jobs.manifest import BadManifest, ManifestType, TypeOptions, read_manifest

from worker_runtime.jobs.child_pool import (
    ChildPool,
    JobChild,
    JobRun,
    NotForked,
    OutputCapture,
    make_ends,
)
from worker_runtime.jobs.own_types.config import OwnTypesConfig
from worker_runtime.jobs.own_types.control import (
    MAX_PACKET_BYTES,
    ChildEnded,
    ChildForked,
    ForkChild,
    ForkFailed,
    FromServer,
    ImportFailed,
    ManifestPart,
    SignalChild,
    StartServer,
    ToServer,
    encode_control,
    read_from_server,
)
from worker_runtime.jobs.own_types.memory import ChildGroup, GroupEntry, JobGroups, open_job_groups
from worker_runtime.jobs.protocol.messages import Job, UnknownJob
from worker_runtime.jobs.types.job_registry import JobRegistry
from worker_runtime.process import kernel
from worker_runtime.process.clock import Backoff
from worker_runtime.process.landlock import landlock_version
from worker_runtime.process.log import Log
from worker_runtime.protocol.errors import BerthError

#: Seconds that the import of an application's code may take.
IMPORT_TIMEOUT_S = 120.0
#: Seconds within which a fork is confirmed: it takes some ms.
_FORK_TIMEOUT_S = 10.0
#: KILLs, about a second apart, after which the fork server counts as stuck.
_MAX_KILLS = 3
#: Seconds within which KILLs of a child count as one: each of its jobs may ask for it.
_SAME_KILL_S = 0.5
#: Seconds within which the end of a child that closed its socket is reported. It takes some ms,
#: unless the application has work to do at the exit of a process.
_END_TIMEOUT_S = 10.0
#: Seconds between two KILLs of a child whose end is not reported.
_KILL_INTERVAL_S = 1.0
#: Seconds between two tries to send a child what its socket had no room for.
_SEND_INTERVAL_S = 0.01
#: Children of async types that are kept though they run nothing.
_MAX_IDLE_SHARED_CHILDREN = 8
#: Jobs that a child of an async type runs before it is replaced.
_MAX_JOBS_PER_SHARED_CHILD = 1000
#: Bytes of a manifest; beyond them the fork server is not believed.
_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
#: What a child inherits of the runner's environment, besides what the configuration names.
_INHERITED_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
#: User ids for fork servers, when the runner is root
#: and none is configured: one for each application.
_FIRST_UID, _UID_COUNT = 40_000, 10_000
_RESIDENT = re.compile(rb"^RssAnon:\s*(\d+) kB$.*?^RssShmem:\s*(\d+) kB$", re.MULTILINE | re.DOTALL)


class OwnTypesUnusable(BerthError, code="OWN_JOB_TYPES_UNUSABLE"):
    """The application's code cannot be imported, or declares no jobs."""


class OwnTypeRegistry(JobRegistry):
    """The application's types, without their code: it is in the fork server only."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[tuple[str, int], ManifestType] = {}

    def load(self, manifest: bytes) -> None:
        """Raises `OwnTypesUnusable`."""
        try:
            decoded = read_manifest(manifest)
        except BadManifest as error:
            raise OwnTypesUnusable(str(error)) from None
        self.types = {(kind.name, kind.version): kind for kind in decoded.types}

    def check(self, job: Job) -> None:
        self.type_of(job)

    def type_of(self, job: Job) -> ManifestType:
        """Raises `UnknownJob`."""
        kind = self.types.get((job.name, job.type_version))
        if kind is None:
            raise UnknownJob(f"this runner does not know {job.queued_type[:200]!r}")
        return kind


class ServedChild(JobChild):
    """Represents one child of the fork server.

    Its `pid` is the number that the runner gave it, not a process id: see `process_id`.
    """

    def __init__(
        self,
        number: int,
        link: socket.socket,
        capture: OutputCapture,
        uses: int,
        send_signal: Callable[["ServedChild", int], None],
        *,
        held_back: bool = False,
    ) -> None:
        """`held_back`: it is to get a cgroup, and is sent nothing before it is in there."""
        super().__init__(number, link, capture, uses)
        self._send_signal = send_signal
        #: Its cgroup, and the bytes that it may have there.
        self.group: ChildGroup | None = None
        self.memory_limit = 0
        self._is_held_back = held_back
        self._held_back: list[bytes] = []
        self._has_sent = False
        #: Its process id, as the fork server says; 0 until then.
        self.process_id = 0
        #: KILLs that were asked for, and the time of the last one.
        self.kills = 0
        self.killed_at = -math.inf
        #: Jobs that run in it.
        self.running = 0
        #: Seconds until which the fork has to be confirmed.
        self.confirm_until = time.monotonic() + _FORK_TIMEOUT_S
        #: Seconds until which its end has to be reported; infinite while its socket is open.
        self.end_until = math.inf

    def kill(self, number: signal.Signals) -> None:
        """Has the child and all it has started signalled."""
        self._send_signal(self, number)

    def send(self, packet: bytes) -> None:
        if not self._is_held_back and not self._held_back:
            super().send(packet)
            self._has_sent = True
        else:
            self._held_back.append(packet)

    def holds_packets(self) -> bool:
        """Returns True if `send_held_back` has something to send."""
        return not self._is_held_back and bool(self._held_back)

    def send_held_back(self) -> None:
        """Sends what came before the child was in its cgroup. Has to be called again while
        `holds_packets`."""
        self._is_held_back = False
        while self._held_back:
            try:
                self.link.send(self._held_back[0])
            except BlockingIOError:
                return
            except OSError:  # its end will be reported
                self.uses = 0
                self.note_unsent()
                self._held_back.clear()
                return
            self._has_sent = True
            del self._held_back[0]

    def note_unsent(self) -> None:
        """Notes that the child has ended before it was sent any of its jobs."""
        if self._held_back and not self._has_sent:
            self.not_forked = "it ended before it was given a job"


class ForkServerPool(ChildPool):
    """All children of one runner of own types, and their fork server."""

    registry: OwnTypeRegistry

    def __init__(
        self,
        registry: OwnTypeRegistry,
        selector: selectors.BaseSelector,
        on_packet: Callable[[JobChild], None],
        recycle: int,
        *,
        own: OwnTypesConfig,
        log: Log,
        on_ended: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """Calls `on_ended` when children have ended, `on_ready` when a fork server can be used."""
        super().__init__(registry, selector, on_packet, recycle)
        self.own = own
        self.log = log
        self.on_ended = on_ended
        self.on_ready = on_ready
        self.ready = False
        self.watches_memory = True
        self.manifest = b""
        self._received = b""
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._backoff = Backoff(0.25, 5.0)
        self._last_number = 0
        self._ended: list[tuple[JobChild, int]] = []
        self._shared: dict[str, list[ServedChild]] = {}
        self._baseline = 0
        self._groups: JobGroups | None = None
        #: False if groups cannot be made, or can no longer.
        self._makes_groups = False
        #: The limit of the last job's child: the next child begins with it.
        self._usual_limit = TypeOptions().memory
        self._import_until = 0.0
        self._closed = False
        #: The jobs have the runner's user: it is not root,
        #: or no other user can run the interpreter.
        self._shares_user = os.geteuid() != 0

    # --- the fork server --------------------------------------------------------------------------

    def open(self) -> None:
        """Starts the fork server and waits for its manifest. Raises `OwnTypesUnusable`."""
        kernel.adopt_orphans()
        self._groups = open_job_groups(self.log)
        if self._groups is not None:
            self._makes_groups = True
            self.selector.register(self._groups.fileno(), selectors.EVENT_READ, self._read_entries)
        self._start()
        while not self.ready:
            if self._control is None:
                raise OwnTypesUnusable("the fork server has ended while it imported the code")
            self._control.settimeout(max(0.01, self._import_until - time.monotonic()))
            try:
                self._handle(self._control.recv(MAX_PACKET_BYTES))
            except TimeoutError:
                raise OwnTypesUnusable(
                    f"the import took more than {IMPORT_TIMEOUT_S:.0f} s"
                ) from None
            finally:
                if self._control is not None:
                    self._control.settimeout(0.0)
        self.registry.load(self.manifest)

    def run_due(self) -> None:
        now = time.monotonic()
        if self._server is None:
            if self._backoff.due() and not self._closed:
                self._start()
            return
        children = [child for child in self._all.values() if isinstance(child, ServedChild)]
        stuck = not self.ready and now > self._import_until
        if stuck or any(not each.process_id and now > each.confirm_until for each in children):
            self._kill_server("it does not answer")
            return
        for child in children:
            if child.holds_packets():
                child.send_held_back()
            if now > child.end_until:  # it is dead, or of no use; perhaps nobody can report that
                child.end_until = now + _KILL_INTERVAL_S
                child.kill(signal.SIGKILL)

    def seconds_until_due(self) -> float:
        now = time.monotonic()
        if self._server is None:
            return self._backoff.seconds_until_due()
        if not self.ready:
            return max(0.0, self._import_until - now)
        due = now + _FORK_TIMEOUT_S
        for child in self._all.values():
            if isinstance(child, ServedChild):
                due = min(due, child.end_until)
                if child.holds_packets():
                    due = min(due, now + _SEND_INTERVAL_S)
        return max(0.0, due - now)

    def unwatch(self, child: JobChild) -> None:
        super().unwatch(child)
        child.uses = 0  # no further job, though its end may be reported later
        if isinstance(child, ServedChild) and child.end_until == math.inf:
            child.end_until = time.monotonic() + _END_TIMEOUT_S

    def _start(self) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        module = "worker_runtime.jobs.own_types.fork_server"
        descriptor = str(far.fileno())
        uid, gid = self._user()
        command = [sys.executable, "-P", "-m", module, descriptor, str(os.getpid())]
        try:
            with far:
                self._server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(far.fileno(),),
                    env=self._environment(),
                    cwd="/",
                    start_new_session=True,
                    user=uid,
                    group=gid,
                    extra_groups=None if uid is None else [],
                )
        except OSError as error:
            near.close()
            if (
                isinstance(error, PermissionError)
                and not self._shares_user
                and landlock_version() >= 6
            ):
                # Root's files are then out of reach only as far as Landlock hides them.
                self._shares_user = True
                self._start()
                return
            self._backoff.failed()
            reason = errno.errorcode.get(error.errno or 0, "")
            hint = f"user {uid} must be able to run {Path(sys.executable).resolve()}" if uid else ""
            self.log.error("fork_server_not_started", reason=reason, hint=hint)
            return
        near.setblocking(False)
        self._control = near
        self._received = b""
        self._import_until = time.monotonic() + IMPORT_TIMEOUT_S
        self.selector.register(near.fileno(), selectors.EVENT_READ, self._read_control)
        start = StartServer(
            application=self.own.application,
            modules=self.own.modules,
            path=self.own.path,
            hidden=(*self.own.hidden, *(self._hidden_from_our_user() if self._shares_user else ())),
            recycle=self.recycle,
        )
        self._send(start)

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        return {**kept, "HOME": "/tmp", "PYTHONUNBUFFERED": "1", **self.own.environment}  # noqa: S108

    def _hidden_from_our_user(self) -> list[str]:
        """Returns what the file system does not keep jobs of the runner's user from: keys, and a
        way out of a cgroup."""
        groups = [] if self._groups is None else [str(self._groups.hierarchy)]
        return [*self.own.key_files, *groups]

    def _user(self) -> tuple[int | None, int | None]:
        """Returns user and group of the fork server; None for each if it has the runner's own."""
        if self._shares_user:
            self.log.warning(
                "own_jobs_share_our_user",
                hint="own jobs cannot read this process's memory or its keys, but can read other "
                "files of its user; start the runner as root, and let other users run "
                f"{Path(sys.executable).resolve()}",
            )
            return None, None
        digest = binascii.crc32(self.own.application.encode())
        uid = self.own.uid or _FIRST_UID + digest % _UID_COUNT
        return uid, self.own.gid or uid

    def _kill_server(self, reason: str) -> None:
        if self._server is not None:
            self.log.error("fork_server_killed", reason=reason, children=len(self._all))
            # Not `Popen.kill`, which may reap it; SIGCHLD follows.
            os.kill(self._server.pid, signal.SIGKILL)

    def _read_control(self) -> None:
        while self._control is not None:
            try:
                packet = self._control.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self._lose_control()
                break
            try:
                self._handle(packet)
            except OwnTypesUnusable as error:
                self.log.error("own_job_types_unusable", reason=error.detail)
                self._kill_server("its import failed")
        if self._ended:
            self.on_ended()

    def _handle(self, packet: bytes) -> None:
        """Raises `OwnTypesUnusable`."""
        if not packet:
            self._lose_control()
            return
        try:
            message: FromServer = read_from_server(packet)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._kill_server("it sent an invalid message")
            return
        if isinstance(message, ManifestPart):
            self._receive_manifest(message)
        elif isinstance(message, ImportFailed):
            raise OwnTypesUnusable(message.reason)
        else:
            child = self._all.get(message.number)
            if not isinstance(child, ServedChild):
                return
            if isinstance(message, ChildForked):
                child.process_id = message.pid
                self._begin(child)
            elif isinstance(message, ForkFailed):
                child.not_forked = message.reason[:40] or "unknown"
                self._end(child, 1)
            elif isinstance(message, ChildEnded):
                self._end(child, message.status)
                self._kill_strays()

    def _receive_manifest(self, part: ManifestPart) -> None:
        if self.ready:
            return
        self._received += part.data
        if len(self._received) > _MAX_MANIFEST_BYTES:
            self._kill_server("its manifest is too large")
        elif part.last:
            if self.manifest and self._received != self.manifest:
                self.manifest_changed = True
                self._kill_server("its code has changed")
                return
            self.manifest = self._received
            self.ready = True
            self._backoff.reset()
            self._baseline = sum(_resident(self._server.pid)) if self._server else 0
            self.on_ready()

    def _lose_control(self) -> None:
        """Closes our end after the fork server has closed its own, or was reaped. Its children are
        dead or dying."""
        self.ready = False
        if self._control is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(self._control.fileno())
            self._control.close()
            self._control = None
        if self._server is not None:
            os.kill(self._server.pid, signal.SIGKILL)

    def _send(self, message: ToServer, descriptors: tuple[int, ...] = ()) -> None:
        """Raises `NotForked` if the server is gone, or does not read."""
        if self._control is None:
            raise NotForked("there is no fork server")
        try:
            if descriptors:
                socket.send_fds(self._control, [encode_control(message)], descriptors)
            else:
                self._control.send(encode_control(message))
        except OSError as error:
            raise NotForked(errno.errorcode.get(error.errno or 0, "")) from None

    # --- the children -----------------------------------------------------------------------------

    def secrets_of(self, job: Job) -> Mapping[str, str]:
        names = self.registry.type_of(job).options.secrets
        return {name: self.own.secrets[name] for name in names if name in self.own.secrets}

    def take(self, job: Job) -> JobChild:
        kind = self.registry.type_of(job)
        if kind.options.concurrency == 1:
            child = self._take_limited(job, kind.options.memory)
            if isinstance(child, ServedChild):
                child.running = 1
            return child
        shared = self._shared.setdefault(job.queued_type, [])
        for child in shared:
            if child.running < kind.options.concurrency and child.uses > 0:
                child.running += 1
                return child
        taken = self._take_limited(job, kind.options.memory * kind.options.concurrency)
        if isinstance(taken, ServedChild):
            taken.shared_by = job.queued_type
            taken.uses, taken.running = _MAX_JOBS_PER_SHARED_CHILD, 1
            shared.append(taken)
        return taken

    def _take_limited(self, job: Job, memory: int) -> JobChild:
        """Returns a child that may have this many bytes. One that has more already, of former jobs,
        takes no further job. Raises `NotForked`."""
        while True:
            child = super().take(job)
            if not isinstance(child, ServedChild) or self._set_limit(child, memory):
                return child
            _retire(child)

    def _set_limit(self, child: ServedChild, memory: int) -> bool:
        """Returns False if the child has more in use."""
        child.memory_limit = self._usual_limit = self._baseline + memory
        if child.group is None or self._groups is None:
            return True
        try:
            return self._groups.change(child.group, child.memory_limit)
        except OSError as error:
            self._lose_groups(error)
            return True

    def give_back(self, child: JobChild) -> None:
        if not isinstance(child, ServedChild):
            return
        child.running = max(0, child.running - 1)
        if not child.shared_by:
            super().give_back(child)
            return
        idle = [each for alike in self._shared.values() for each in alike if each.running == 0]
        shared = self._shared[child.shared_by]
        if (
            child in shared
            and not child.running
            and (child.uses <= 0 or len(idle) > _MAX_IDLE_SHARED_CHILDREN)
        ):
            shared.remove(child)
            _retire(child)

    def ran_out_of_memory(self, child: JobChild) -> bool:
        if child.out_of_memory:
            return True
        if not isinstance(child, ServedChild) or child.group is None:
            return False
        return child.group.exceeded_limit()

    def exceeds_memory(self, run: JobRun) -> bool:
        child = run.child
        if self.ran_out_of_memory(child):
            return True
        if not isinstance(child, ServedChild) or not child.process_id or self._server is None:
            return False
        if _parent(child.process_id) != self._server.pid:
            return False
        limit = self.registry.type_of(run.job).options.memory * max(1, child.running)
        return bool(_resident_of_tree(child.process_id) > self._baseline + limit)

    def reap(self) -> list[tuple[JobChild, int]]:
        """Returns the children that have ended; collects the fork server and strays, too."""
        for pid in kernel.ended_children():
            if self._server is not None and pid == self._server.pid:
                status = self._server.wait()
                self._server_ended(status)
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Kills and reaps the fork server and all children."""
        self._closed = True
        self._lose_control()
        if self._server is not None:
            self._server.wait()
            self._server = None
        kernel.kill_children(2.0)
        for child in list(self._all.values()):
            self.forget(child)
            if isinstance(child, ServedChild) and child.group is not None:
                child.group.close()
        self._all.clear()
        self._free.clear()
        if self._groups is not None:
            self.selector.unregister(self._groups.fileno())
            self._groups.close()
            self._groups = None

    def _fork(self) -> JobChild:
        if not self.ready:
            raise NotForked("the fork server is being started")
        self._last_number += 1
        number = self._last_number
        try:
            with contextlib.ExitStack() as runner_ends, contextlib.ExitStack() as child_ends:
                near, reader, far, writer = make_ends(runner_ends, child_ends)
                self._send(ForkChild(number=number), (far.fileno(), writer))
                runner_ends.pop_all()  # they stay open
        except OSError as error:
            raise NotForked(errno.errorcode.get(error.errno or 0, "")) from None
        capture = OutputCapture(reader)
        child = ServedChild(
            number, near, capture, self.recycle, self._signal, held_back=self._makes_groups
        )
        child.memory_limit = self._usual_limit
        return self._watch(child)

    def _begin(self, child: ServedChild) -> None:
        """Has a child that was forked put into a cgroup, before it is sent a job."""
        if self._makes_groups and self._groups is not None and self._server is not None:
            server = self._server.pid
            self._groups.enter(child.pid, child.process_id, server, child.memory_limit)
        else:
            child.send_held_back()

    def _read_entries(self) -> None:
        if self._groups is not None:
            for entry in self._groups.entries():
                self._entered(self._groups, entry)

    def _entered(self, groups: JobGroups, entry: GroupEntry) -> None:
        if entry.is_foreign:
            self._kill_server("it named a process that is not its child")
            return
        if entry.error is not None:
            self._lose_groups(entry.error)
        child = self._all.get(entry.number)
        if not isinstance(child, ServedChild):  # it has ended
            if entry.group is not None:
                groups.end(entry.group)
        elif entry.group is not None or entry.error is not None:
            child.group = entry.group
            if entry.group is not None:
                try:
                    groups.change(entry.group, child.memory_limit)  # a job has come meanwhile
                except OSError as error:
                    self._lose_groups(error)
            child.send_held_back()

    def _lose_groups(self, error: OSError) -> None:
        """Limits further children by their resident size: somebody has removed the runner's folder,
        or the host has too many groups."""
        if self._makes_groups:
            self._makes_groups = False
            reason = errno.errorcode.get(error.errno or 0, "")
            self.log.error("own_jobs_memory", limited_by="resident size", reason=reason)

    def _signal(self, child: ServedChild, number: int) -> None:
        if self._all.get(child.pid) is not child:
            return
        if number == signal.SIGKILL:
            now = time.monotonic()
            if now < child.killed_at + _SAME_KILL_S:
                return
            child.killed_at = now
            child.kills += 1
            child.uses = 0  # no further job comes to it before it ends
        try:
            self._send(SignalChild(number=child.pid, signal=int(number)))
        except NotForked as error:
            self._kill_server(error.detail)
            return
        if child.kills >= _MAX_KILLS:
            self._kill_server("a child that was killed does not end")

    def _end(self, child: ServedChild, status: int) -> None:
        self._all.pop(child.pid, None)
        if child in self._free:
            self._free.remove(child)
        if child in self._shared.get(child.shared_by, ()):
            self._shared[child.shared_by].remove(child)
        child.note_unsent()
        if child.group is not None:
            child.out_of_memory = self.ran_out_of_memory(child)
            if self._groups is not None:
                self._groups.end(child.group)
            child.group = None
        self._ended.append((child, status))

    def _server_ended(self, status: int) -> None:
        """Ends all children. The kernel has killed them with the fork server; any that escaped are
        this process's children now, and are killed here."""
        self.log.error("fork_server_ended", status=status, children=len(self._all))
        self._server = None
        self._lose_control()
        self._backoff.failed()
        kernel.kill_children(2.0)
        for child in list(self._all.values()):
            if isinstance(child, ServedChild):
                self._end(child, -signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Kills processes that jobs have left behind in sessions of their own. The kernel has made
        them children of this process."""
        server = 0 if self._server is None else self._server.pid
        for pid in _children_of(os.getpid()):
            if pid != server:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _retire(child: ServedChild) -> None:
    """Has a child end by itself, once the jobs that it has are done."""
    child.uses = 0
    with contextlib.suppress(OSError):
        child.link.shutdown(socket.SHUT_WR)


def _children_of(pid: int) -> set[int]:
    """Returns the processes that this one has started, in any of its threads."""
    children: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # it has just ended
                children.update(
                    map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
                )
    return children


def _parent(pid: int) -> int:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, ValueError, IndexError):
        return 0


def _resident(pid: int) -> tuple[int, int]:
    """Returns the bytes of a process's memory that no file holds: its own, and what others may
    share with it. Both are 0 if it is gone."""
    try:
        match = _RESIDENT.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        match = None
    return (int(match[1]) * 1024, int(match[2]) * 1024) if match else (0, 0)


def _resident_of_tree(pid: int) -> int:
    """Returns the bytes of a process and what it has started. Shared memory is counted once: as
    much as the process has that has the most of it."""
    sizes = [_resident(process) for process in _tree_of(pid)]
    return sum(own for own, _ in sizes) + max(shared for _, shared in sizes)


def _tree_of(pid: int, depth: int = 0) -> set[int]:
    processes = {pid}
    for child in _children_of(pid) if depth < 16 else ():
        processes |= _tree_of(child, depth + 1)
    return processes
