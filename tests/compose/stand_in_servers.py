"""The servers of images that cannot be pulled here, in their place: `stand_in_servers.py NAME
[ARGUMENT …]`.

Each takes the environment, mounts and rights that `compose.yaml` gives the real image, and runs as
a user of its own, as that does. So a script that its user cannot read, or a wrong password, shows
here too. Temporal is the dev server: it keeps its data in a file instead of PostgreSQL, and asks
nobody for a JWT.

`nc` and `valkey-cli` answer the health checks; the image's own programs are absent.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: The users of the real images.
POSTGRES, VALKEY, TEMPORAL = 999, 999, 1000
_DATA = Path("/var/lib/postgresql/18/docker")
_FRONTEND_PORT = 7233
_DYNAMIC = Path("/etc/temporal/berth/dynamic.yaml")


def _as_user(user: int, *words: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words]


def _give(folder: Path, user: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user)


def postgres(command: str, *options: str) -> None:
    """As the real entrypoint: makes the data folder once, with the mounted scripts."""
    _give(_DATA.parent, POSTGRES)
    os.environ["PGHOST"] = "/tmp"  # noqa: S108 - of the container
    if not (_DATA / "PG_VERSION").exists():
        name = os.environ["POSTGRES_USER"]
        password = os.environ["POSTGRES_PASSWORD_FILE"]
        made = [
            "initdb",
            "-D",
            str(_DATA),
            "-U",
            name,
            "--pwfile",
            password,
            "--auth-host=scram-sha-256",
        ]
        subprocess.run(_as_user(POSTGRES, *made, "--no-sync"), check=True)
        with (_DATA / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")
        control = ["pg_ctl", "-D", str(_DATA), "-w"]
        subprocess.run(
            _as_user(POSTGRES, *control, "-o", "-c listen_addresses=", "start"), check=True
        )
        for script in sorted(Path("/docker-entrypoint-initdb.d").glob("*.sh")):
            subprocess.run(_as_user(POSTGRES, "sh", str(script)), check=True)
        subprocess.run(_as_user(POSTGRES, *control, "-m", "fast", "stop"), check=True)
    _become(_as_user(POSTGRES, command, "-D", str(_DATA), "-h", "0.0.0.0", *options))  # noqa: S104 - in a container


def valkey(*command: str) -> None:
    _give(Path("/data"), VALKEY)
    _become(_as_user(VALKEY, *command))


def temporal() -> None:
    _give(Path("/data"), TEMPORAL)
    for mounted in (_DYNAMIC, Path(os.environ["TEMPORAL_SERVER_CONFIG_FILE_PATH"])):
        subprocess.run(
            _as_user(TEMPORAL, "cat", str(mounted)), check=True, stdout=subprocess.DEVNULL
        )
    words = ["temporal", "server", "start-dev", "--ip", "0.0.0.0", "--headless"]  # noqa: S104
    words += ["--db-filename", "/data/temporal.db", "--log-level", "warn"]
    lines = _DYNAMIC.read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if line and not line.startswith("#")]
    for name, value in zip(values[::2], values[1::2], strict=True):
        words += ["--dynamic-config-value", f"{name.rstrip(':')}={value.split(': ', 1)[1]}"]
    _listen_as_configured()
    _become(_as_user(TEMPORAL, "env", "HOME=/data", *words))


def _listen_as_configured() -> None:
    """Listens on the ports of the mounted configuration that the dev server does not have.

    Each on its own address, so that another container finds out which it reaches. They answer
    nothing.
    """
    text = Path(os.environ["TEMPORAL_SERVER_CONFIG_FILE_PATH"]).read_text(encoding="utf-8")
    for rpc in re.findall(r"rpc: \{(.+)\}", text):
        [address] = re.findall(r'bindOnIP: "([\d.]+)"', rpc)
        for port in map(int, re.findall(r"Port: (\d+)", rpc)):
            if port != _FRONTEND_PORT:
                listener = socket.create_server((address, port)).detach()
                # It stays open in the server that this process becomes.
                os.set_inheritable(listener, True)


def nc(*arguments: str) -> None:
    """`nc -z HOST PORT`: whether somebody listens."""
    with socket.create_connection((arguments[-2], int(arguments[-1])), timeout=3.0):
        pass


def valkey_cli(*_: str) -> None:
    """Commands come on standard input, a line each."""
    with (
        socket.create_connection(("127.0.0.1", 6379), timeout=3.0) as link,
        link.makefile("rw") as lines,
    ):
        for command in sys.stdin:
            lines.write(f"{command.strip()}\r\n")
            lines.flush()
            sys.stdout.write(lines.readline())


def schema() -> None:
    """The dev server has its own; the secret can be read all the same."""
    Path("/run/secrets/temporal_database_password").read_text(encoding="utf-8")


def _become(words: Sequence[str]) -> None:
    os.execvp(words[0], list(words))  # noqa: S606


if __name__ == "__main__":
    called = Path(sys.argv[0]).name
    name, rest = (
        (called, sys.argv[1:]) if called in ("nc", "valkey-cli") else (sys.argv[1], sys.argv[2:])
    )
    globals()[name.replace("-", "_")](*rest)
