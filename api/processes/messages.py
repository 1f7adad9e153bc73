"""The messages between a master and its API processes, in frames over a socket pair that only the
two have.

A frame is its length in four bytes, then one message in MessagePack. Nothing here waits for the
other side: a message for somebody who does not read is dropped.
"""

import asyncio
from typing import TypeVar

import msgspec

from infra.process_metrics import Samples

#: Bytes. The samples of a busy process take 70,000.
MAX_FRAME_BYTES = 8 << 20
#: Bytes that wait for a reader; with more, further messages are dropped.
MAX_BACKLOG_BYTES = 1 << 20
_LENGTH_BYTES = 4


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The process serves. Sent once a second, by a loop that has nothing to do with metrics."""


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """Carries what a process has counted. `number`: of the question that it answers; 0: nobody
    asked."""

    samples: Samples
    number: int = 0


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """A process was scraped. It brings its own samples and asks for those of all processes."""

    number: int
    samples: Samples


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process ends, because of this."""

    reason: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """The master asks for `Counted`."""

    number: int


class Gathered(msgspec.Struct, frozen=True, tag="gathered"):
    """The answer to `Gather`: the sum over all processes, dead ones included."""

    number: int
    #: The number of processes that answered in time, the scraped one included. For the others the
    #: last samples count.
    answered: int
    #: The number of processes that have ended though nobody asked them to.
    died: int
    samples: Samples


ToMaster = Alive | Counted | Gather | Failed
FromMaster = Ask | Gathered
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToMaster | FromMaster) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES) + body


def send(writer: asyncio.StreamWriter, message: ToMaster | FromMaster) -> bool:
    """Sends a message without waiting. Returns False if it was dropped."""
    if writer.is_closing() or writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
        return False
    writer.write(encode_frame(message))
    return True


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Return the next message; None if it cannot be read.

    Raises `EOFError` or `OSError` at the end of the connection,
    `OverflowError` for a frame that is too long.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES))
    if length > MAX_FRAME_BYTES:
        raise OverflowError(f"a frame of {length} bytes")
    body = await reader.readexactly(length)
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError:
        return None
