"""A hostile job of an application's own: it gets no key, no login, no other job's arguments or
secrets.

With a user of its own, as where the runner is root; and with the runner's own user, where Landlock
and unreadable memory have to do: also with root's, where no other user can run the interpreter.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.berth_jobs.options import job_fields
from infra.local.servers import ValkeyServer
from tests.support.interpreters import opened_interpreter
from tests.support.jobs.runners import LEASE, RunnerProcess
from tests.support.systems.processes import alive
from tests.support.waiting import eventually
from worker_runtime.jobs.config import RunnerConfig
from worker_runtime.jobs.own_types.config import OwnTypesConfig
from worker_runtime.jobs.protocol import calls as job_calls
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.jobs.protocol.messages import Job, read_signed_result
from worker_runtime.process.cgroup import LimitsUnavailable, group_for_groups
from worker_runtime.process.landlock import landlock_version
from worker_runtime.process.valkey import Valkey
from worker_runtime.protocol.authentication import MessageKey

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(90)]

TAG = job_keys.application_tag("shop")
#: What the attack looks for. No pattern fits itself, so the attacker's own arguments do not count.
PATTERNS = [
    "berth-ke[y]-[0-9a-f]{22}",
    "login-of-valke[y]-[0-9a-f]{32}",
    "sk_liv[e]_[0-9a-f]{32}",
    "card-numbe[r]-[0-9a-f]{32}",
]
#: A user that no other process of this run has.
USER = 58_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


@dataclass
class AttackedRunner:
    """A runner of own types with a hostile one among them."""

    process: RunnerProcess
    client: Valkey
    server: ValkeyServer
    keys: tuple[MessageKey, ...]
    folder: Path
    key_file: Path
    secret: str
    #: The jobs have the user of root, without its rights.
    as_root: bool

    @property
    def valkey_folder(self) -> Path:
        return self.server.directory

    def add(self, function: str, **arguments: Any) -> str:
        from berth_jobs.manifest import read_manifest

        [entry] = self.client.execute("HVALS", job_keys.manifests(TAG))
        manifest = read_manifest(entry.partition(b" ")[2])
        [kind] = [each for each in manifest.types if each.name == f"shop/own_attacks.{function}"]
        job = Job(
            job_id=f"{function}-{secrets.token_hex(4)}",
            **job_fields(kind, msgspec.json.encode(arguments)),
        )
        assert self.client.run(*job_calls.enqueue(job, self.keys, TAG))[0] == b"queued"
        return job.job_id

    def value(self, job_id: str) -> Any:
        key = job_keys.result(TAG, job_id)
        stored = eventually(lambda: self.client.execute("GET", key), f"a result of {job_id}", 60.0)
        result = read_signed_result(stored, job_id, self.keys)
        assert result.failure is None, result
        return msgspec.json.decode(result.value)

    def runs(self, job_id: str) -> None:
        key = job_keys.job(TAG, job_id)
        eventually(
            lambda: self.client.execute("HGET", key, "state") == b"running", f"{job_id} to run"
        )


@pytest.fixture(params=["a user of its own", "the runner's user", "root's user"])
def attacked(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[AttackedRunner]:
    folder = Path(tempfile.mkdtemp(prefix="berth-attack-"))
    folder.chmod(0o755)
    password = f"login-of-valkey-{secrets.token_hex(16)}"
    keys = (MessageKey(1, f"berth-key-{secrets.token_hex(11)}".encode()),)
    key_file = folder / "keys" / "application.key"
    key_file.parent.mkdir(mode=0o700)
    key_file.write_bytes(keys[0].key)
    key_file.chmod(0o600)
    before: list[str] = []
    as_root = request.param == "root's user"
    if request.param != "root's user":
        before = opened_interpreter(folder)
    elif opened_interpreter(folder) == [] or landlock_version() < 6:
        pytest.skip("other users reach the interpreter, so the jobs have another user than root")
    if request.param == "the runner's user":
        if landlock_version() < 6:
            pytest.skip("this kernel's Landlock does not keep signals apart")
        uid = USER
        os.chown(key_file.parent, uid, uid)
        os.chown(key_file, uid, uid)
        before += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    secret = f"sk_live_{secrets.token_hex(16)}"
    own = OwnTypesConfig(
        application="shop",
        modules=("own_attacks",),
        path=(str(Path(__file__).parent / "packages"),),
        secrets={"STRIPE_KEY": secret},
        key_files=(str(key_file),),
    )
    with ValkeyServer(short_directory / "valkey", durable=False, password=password) as server:
        client = Valkey(server.url)
        config = RunnerConfig(
            name="one",
            valkey_url=server.url,
            message_keys=keys,
            tag=TAG,
            own=own,
            slots=8,
            lease=LEASE,
            kill_grace=0.3,
        )
        process = RunnerProcess(folder, config, "worker_runtime.jobs", before)
        eventually(
            lambda: client.execute("EXISTS", job_keys.manifests(TAG)), "a runner with its types"
        )
        yield AttackedRunner(process, client, server, keys, folder, key_file, secret, as_root)
        process.close()
        client.close()
    shutil.rmtree(folder)


def test_a_hostile_job_gets_nothing_but_its_own(attacked: AttackedRunner) -> None:
    gate = str(attacked.folder / "gate")
    card = f"card-number-{secrets.token_hex(16)}"
    others = [
        attacked.add("hold", secret_argument=card, until=gate),
        attacked.add("hold_secret", until=gate),
    ]
    for job_id in others:
        attacked.runs(job_id)
    files = [str(attacked.key_file)]
    if not attacked.as_root:  # its other files are not hidden, as the runner's log says
        files += [str(path) for path in attacked.valkey_folder.rglob("*") if path.is_file()]
        assert len(files) > 1
        files.append("/etc/shadow")
    job_id = attacked.add(
        "attack", patterns=PATTERNS, files=files, valkey_port=attacked.server.port
    )
    report = attacked.value(job_id)
    refused = report.pop("refused")
    described = {
        name: report.pop(name)
        for name in ("descriptors", "environment", "secrets", "valkey", "user")
    }
    users = report.pop("users of its processes")
    assert report.pop("can read itself") == ["a-mark-of-its-own"]
    # The numbers of descriptors, but not what they are; and a user id without rights.
    if attacked.as_root:
        report = {name: got for name, got in report.items() if not name.startswith("descriptors ")}
        assert report.pop("become root") == "root"
    # No memory, argument list, environment, descriptor, trace, signal or file of another.
    assert report == {}
    assert described["secrets"] == {}
    assert described["valkey"].startswith("-NOAUTH")
    assert attacked.as_root or described["user"] != os.getuid()
    assert all(user == described["user"] or user == 0 for user in users)
    assert not any("BERTH" in name or "VALKEY" in name for name in described["environment"])
    # Its output, its socket to the runner, nothing, and what listing them opens.
    kinds = {each.partition(":")[0] for each in described["descriptors"]}
    assert kinds <= {
        "pipe",
        "socket",
        "/dev/null",
        "/proc/self/fd",
        f"/proc/{attacked.process.process.pid}/fd",
    }
    assert sum(each.startswith("socket") for each in described["descriptors"]) == 1
    runner = attacked.process.process.pid
    for attack in ("memory", "environ", "ptrace", "signal"):
        assert any(line.startswith(f"{attack} {runner}:") for line in refused)
    (attacked.folder / "gate").touch()
    assert [attacked.value(job_id) for job_id in others] == [len(card), len(attacked.secret)]


def test_a_hostile_job_does_not_leave_its_cgroup(attacked: AttackedRunner) -> None:
    try:
        _, group = group_for_groups()
    except LimitsUnavailable:
        group = Path("/sys/fs/cgroup")  # the job has none, and makes none
    other = attacked.add("hold", secret_argument="x", until=str(attacked.folder / "gate"))
    attacked.runs(other)
    folders = [group, group.parent, *(path for path in group.glob("berth-jobs-*/**/"))]
    [limited] = attacked.process.logged("own_jobs_memory")
    assert limited["limited_by"] == "resident size" or Path(limited["folder"]) in folders
    assert attacked.value(attacked.add("leave_cgroup", folders=list(map(str, folders)))) == []
    (attacked.folder / "gate").touch()
    assert attacked.value(other) == 1


def test_a_hostile_job_ends_and_deceives_nobody(attacked: AttackedRunner) -> None:
    gate = str(attacked.folder / "gate")
    other = attacked.add("hold", secret_argument="x", until=gate)
    attacked.runs(other)
    assert attacked.value(attacked.add("kill_everything")) == []
    attacked.add("lie_to_the_runner")
    eventually(
        lambda: attacked.process.logged("job_child_sent_invalid_packet"), "the runner to notice"
    )
    assert alive(attacked.process.process.pid)
    (attacked.folder / "gate").touch()
    assert attacked.value(other) == 1
