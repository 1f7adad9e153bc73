"""Forwards TCP connections to one port of one server: `python -m infra.compose.tcp_proxy
HOST:PORT`.

It listens on the same port, on all addresses of its container, and reads nothing of what it
forwards. While the server does not answer, connections are closed at once and clients try again.

Why: a container that shares a network with Temporal's server reaches every port on which that
listens, and the membership port of its frontend asks for no login. So the server's clients share
a network with this proxy in its place.
"""

import asyncio
import socket
import sys

#: Bytes of one read. While one side does not take them, the other side is not read.
CHUNK_BYTES = 65_536
#: Server and proxy are on one machine, where a connection takes well below a millisecond.
CONNECT_TIMEOUT_S = 5.0
#: Seconds of silence after which a peer is asked whether it is there, and between two questions;
#: after three without an answer the connection is closed.
KEEPALIVE_INTERVAL_S = 20


class TcpProxy:
    """Connects each client to the server at `host`:`port`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._answers = True

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Accepts clients until the returned server is closed. Raises OSError."""
        return await asyncio.start_server(self._forward, host, port, limit=CHUNK_BYTES)

    async def _forward(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                # By its name each time: a server that was made anew has another address.
                from_server, to_server = await asyncio.open_connection(
                    self._host, self._port, limit=CHUNK_BYTES
                )
        except OSError as error:
            self._report(str(error) or "no connection in time")
            to_client.transport.abort()
            return
        self._report("")
        for writer in (to_server, to_client):
            _keep_alive(writer.get_extra_info("socket"))
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_copy(from_client, to_server))
                directions.create_task(_copy(from_server, to_client))
        except* OSError:  # one side is gone, so the other hears of it
            to_server.transport.abort()
            to_client.transport.abort()
        finally:
            to_server.close()
            to_client.close()

    def _report(self, failure: str) -> None:
        """Writes a line when the server stops answering, and when it answers again."""
        if self._answers == (not failure):
            return
        self._answers = not failure
        state = f"does not answer: {failure}" if failure else "answers again"
        sys.stderr.write(f"{self._host}:{self._port} {state}\n")
        sys.stderr.flush()


def _keep_alive(link: socket.socket) -> None:
    """Closes a connection whose peer vanished without a word."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 3 * KEEPALIVE_INTERVAL_S * 1000),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until `reader` ends, then passes the end on. Raises OSError."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


async def run(host: str, port: int) -> None:
    """Raises OSError if the port cannot be opened."""
    server = await TcpProxy(host, port).listen("0.0.0.0", port)  # noqa: S104 - of its container
    await server.serve_forever()


def main(arguments: list[str]) -> int:
    host, _, port = "".join(arguments).rpartition(":")
    if not host or not port.isdecimal():
        sys.stderr.write("usage: python -m infra.compose.tcp_proxy HOST:PORT\n")
        return 2
    try:
        asyncio.run(run(host, int(port)))
    except OSError as error:
        sys.stderr.write(f"tcp_proxy: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
