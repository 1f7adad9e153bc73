"""What the real SDK does to a process: forks before and after its client is made, and what it
writes down.

Each test runs it in a process whose only network is its own loopback: nobody talks to the broker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.lab.shioaji import cost
from tests.support import needs

needs.require("shioaji")
pytestmark = pytest.mark.needs("network namespaces")

#: Forks children that make a client, and says how each ended: its exit code, or minus the signal.
FORKS = """
import json, os, signal, sys, time
from infra.lab.shioaji.cost import cut_off_network
cut_off_network()
os.environ["SJ_LOG_PATH"] = sys.argv[2] + "/log"
os.environ["SJ_HOME_PATH"] = os.environ["SJ_CONTRACTS_PATH"] = sys.argv[2]
import shioaji
if sys.argv[1] == "client":
    kept = shioaji.Shioaji(simulation=True)
ends = []
for _ in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        shioaji.Shioaji(simulation=True)
        os._exit(0)
    until, done = time.monotonic() + 20, 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ends.append(-signal.SIGKILL)
    else:
        ends.append(os.waitstatus_to_exitcode(status))
    if sys.argv[1] == "client" and ends[-1]:
        break
print(json.dumps(ends), flush=True)
os._exit(0)
"""


def ends_of_children(before_the_fork: str, folder: Path, count: int) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, before_the_fork, str(folder), str(count)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    ends: list[int] = json.loads(done.stdout.splitlines()[-1])
    return ends


def test_a_fork_after_the_import_is_safe(tmp_path: Path) -> None:
    assert ends_of_children("import", tmp_path, 10) == [0] * 10


def test_a_fork_after_the_client_was_made_is_not(tmp_path: Path) -> None:
    """Why a worker forks first. A child dies now and then: so up to 12 of them try."""
    ends = ends_of_children("client", tmp_path, 12)
    assert any(ends), "all children lived: see whether the zygote may make the client"


#: A worker's login with the real SDK. It ends without a network, and shows where it was.
LOGIN = """
import os, sys
from infra.lab.shioaji.cost import cut_off_network
cut_off_network()
from types import SimpleNamespace
from worker_runtime.brokers.port import ConnectionKey
from worker_runtime.brokers.registry import create_broker
from worker_runtime.protocol.errors import BrokerError
from worker_runtime.protocol.messages import Credentials
config = SimpleNamespace(paper_exchange="", broker_options={})
key = ConnectionKey("shioaji", "stock", False, "9800111")
broker = create_broker(config, key, "worker/1", print)
keys = Credentials(
    api_key=sys.argv[1], secret_key=sys.argv[2], person_id="A123456789",
    ca_certificate=b"CanaryCertificate", ca_password="CanaryCaPassword",
)
for _ in range(2):
    try:
        broker.login(keys, 12.0)
    except BrokerError as error:
        os.write(3, f"{error.code}: {error.detail}\\n".encode())
os.write(3, f"folder {os.environ['SJ_HOME_PATH']}\\n".encode())
os.read(4, 1)
broker.close()
os._exit(0)
"""
API_KEY, SECRET_KEY = (
    "CanaryApiKeyCanaryApiKeyCanaryApiKeyCanary2",
    "CanarySecretKeyCanarySecretKeyCanarySecret3",
)
#: As few characters of a credential as would be worth something: the SDK prints the first ten of an
#: API key.
PART = 6


def parts_of(*secrets: str) -> set[str]:
    return {
        secret[start : start + PART]
        for secret in secrets
        for start in range(len(secret) - PART + 1)
    }


def test_nothing_of_a_credential_is_in_what_the_sdk_writes(tmp_path: Path) -> None:
    home, cwd, temporary = (tmp_path / name for name in ("home", "cwd", "tmp"))
    for folder in (home, cwd, temporary):
        folder.mkdir()
    told, tell = os.pipe()
    wait, go = os.pipe()
    code = f"import os; os.dup2({tell}, 3); os.dup2({wait}, 4)\n{LOGIN}"
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", code, API_KEY, SECRET_KEY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=environment,
        pass_fds=(tell, wait),
    ) as process:
        os.close(tell)
        said = b""
        while b"folder " not in said or not said.endswith(b"\n"):
            read = os.read(told, 4096)
            assert read, f"the process ended early: {process.communicate()[1].decode()[-2000:]}"
            said += read
        folder = Path(said.decode().rsplit("folder ", 1)[1].strip())
        written = {
            path: path.read_bytes()
            for place in (home, cwd, temporary, folder)
            for path in place.rglob("*")
            if path.is_file()
        }
        os.write(go, b"x")
        output, errors = process.communicate(timeout=60)
    for descriptor in (told, wait, go):
        os.close(descriptor)
    texts = {
        "stdout": output,
        "stderr": errors,
        "errors": said,
        **{str(path): text for path, text in written.items()},
    }
    secrets = parts_of(API_KEY, SECRET_KEY, "A123456789", "CanaryCertificate", "CanaryCaPassword")
    for name, text in texts.items():
        leaks = {part for part in secrets if part.encode().lower() in text.lower()}
        assert not leaks, f"{name} has {leaks}"
    assert not [path for path in written if folder not in path.parents], (
        "files outside of the private folder"
    )
    assert not folder.exists() or not any(folder.iterdir())


def test_the_line_that_the_sdk_prints_is_why_its_output_goes_nowhere(tmp_path: Path) -> None:
    """Without `silence_libraries` the first characters of the API key are on standard error."""
    code = (
        "import os, sys\n"
        "from infra.lab.shioaji.cost import cut_off_network\n"
        "cut_off_network()\n"
        f"os.environ['SJ_LOG_PATH'] = {str(tmp_path / 'log')!r}\n"
        f"os.environ['SJ_HOME_PATH'] = os.environ['SJ_CONTRACTS_PATH'] = {str(tmp_path)!r}\n"
        "import shioaji\n"
        "try: shioaji.Shioaji(simulation=True).login(sys.argv[1], sys.argv[2])\n"
        "except Exception as error: print(type(error).__name__)\n"
        "sys.stdout.flush(); os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, API_KEY, SECRET_KEY],
        capture_output=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert b"ShioajiConnectionError" in done.stdout
    assert f"PYAPI/{API_KEY[:10]}/".encode() in done.stderr
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(part.encode() in files for part in parts_of(API_KEY, SECRET_KEY))


def test_what_it_costs_is_measured_without_a_network() -> None:
    done = subprocess.run(
        [sys.executable, "-m", cost.__name__, "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    runs = json.loads(done.stdout)["runs"]
    assert [run["sessions"] for run in runs] == [1, 2, 2]
    assert all(run["imported_mib"] < 40 and run["client_mib"] < 60 for run in runs)
