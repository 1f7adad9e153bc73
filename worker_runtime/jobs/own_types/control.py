"""The messages between a runner and its fork server, one as JSON in each packet.

A fork server holds the application's code, so the runner believes nothing that could hurt
it: a process id in a message is used for reading `/proc`, and only of a process whose
parent is the fork server.
"""

import msgspec

#: Bytes of one packet, and of the part of a manifest that one carries (as base64).
MAX_PACKET_BYTES = 128 * 1024
MANIFEST_PART_BYTES = 64 * 1024


class StartServer(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Runner → server, first: import these modules,
    or those of all entry points if there are none."""

    application: str
    modules: tuple[str, ...] = ()
    #: Folders that are searched for modules before the installed packages.
    path: tuple[str, ...] = ()
    #: Folders and files that the jobs do not reach.
    hidden: tuple[str, ...] = ()
    #: Jobs that one child runs.
    recycle: int = 1


class ManifestPart(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """Server → runner: a part of the manifest; after the last one the server forks."""

    data: bytes
    last: bool


class ImportFailed(msgspec.Struct, frozen=True, kw_only=True, tag="import_failed"):
    """Server → runner: the modules cannot be used; the server ends."""

    reason: str


class ForkChild(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Runner → server, with two descriptors:
    the child's ends of its socket and of its output's pipe."""

    number: int


class ChildForked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """Server → runner."""

    number: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fork_failed"):
    """Server → runner: the host has no process, memory or descriptor left."""

    number: int
    reason: str


class SignalChild(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Runner → server: signal a child and all that it has started."""

    number: int
    signal: int


class ChildEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Server → runner. `status`: the exit code, or the signal's number, negative."""

    number: int
    status: int


ToServer = StartServer | ForkChild | SignalChild
FromServer = ManifestPart | ImportFailed | ChildForked | ForkFailed | ChildEnded

encode_control = msgspec.json.Encoder().encode
_to_server: msgspec.json.Decoder[ToServer] = msgspec.json.Decoder(ToServer)
_from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)
read_to_server = _to_server.decode
read_from_server = _from_server.decode
