"""The messages between runner and child over their socket pair: one message a packet."""

from __future__ import annotations

import socket

import msgspec

from worker_runtime.jobs.protocol.messages import NULL
from worker_runtime.protocol.messages import Failure

#: Bytes of one packet: a job or a result (64 KiB each) and its envelope.
MAX_PACKET = 160 * 1024


class JobAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Runner → child: run this job."""

    fence: int
    attempt: int
    job: msgspec.Raw


class JobProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Child → runner: the job's progress."""

    fence: int
    value: msgspec.Raw


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """Child → runner: how the job ended; `value` counts unless `failure` is set."""

    fence: int
    value: msgspec.Raw = NULL
    failure: Failure | None = None
    #: Seconds that the job ran.
    took: float = 0.0
    traceback: str = ""
    #: Seconds until another attempt, if the job asked for that.
    delay: float | None = None
    #: The child takes no further job.
    last: bool = False


ChildReport = JobProgress | RunOutcome

encode_message = msgspec.json.Encoder().encode
read_assignment = msgspec.json.Decoder(JobAssignment).decode
#: One buffer for all sockets of the process, which has one thread. A new one for each packet costs 15 us
#: (measured), as much as the rest of the call.
_buffer = bytearray(MAX_PACKET)
_view = memoryview(_buffer)


def receive_packet(link: socket.socket) -> bytes:
    """One packet; b"" when the other side has closed. Raises `OSError`."""
    return bytes(_view[: link.recv_into(_buffer)])


_reports: msgspec.json.Decoder[ChildReport] = msgspec.json.Decoder(ChildReport)
read_report = _reports.decode
