"""Memory limits are set on hosts of both kinds, simulated by plain folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_runtime.process.cgroup import (
    LEAF,
    LimitsUnavailable,
    MemoryGroup,
    MemoryGroups,
    find_groups,
)


def proc(folder: Path, *, cgroup: str, mountinfo: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


def mount(kind: str, where: Path, root: str = "/", options: str = "rw") -> str:
    return f"30 24 0:26 {root} {where} rw,nosuid shared:9 - {kind} cgroup {options}\n"


def test_the_limits_of_v1_are_written_to_their_files(tmp_path: Path) -> None:
    group = MemoryGroups(1, tmp_path / "berth").create("task-1", soft=100, hard=200)
    assert group.path == tmp_path / "berth" / "task-1"
    written = {file.name: file.read_text() for file in group.path.iterdir()}
    assert written == {
        "memory.limit_in_bytes": "200",
        "memory.memsw.limit_in_bytes": "200",
        "memory.soft_limit_in_bytes": "100",
    }


def test_the_limits_of_v2_are_written_to_their_files_and_swap_is_off(tmp_path: Path) -> None:
    group = MemoryGroups(2, tmp_path / "berth").create("task-1", soft=100, hard=200)
    written = {file.name: file.read_text() for file in group.path.iterdir()}
    assert written == {"memory.max": "200", "memory.low": "100", "memory.swap.max": "0"}


def test_a_group_of_v2_whose_processes_die_together_says_so_and_that_of_v1_cannot(
    tmp_path: Path,
) -> None:
    second = MemoryGroups(2, tmp_path / "second").create("1", hard=200, die_together=True)
    written = {file.name: file.read_text() for file in second.path.iterdir()}
    assert written == {"memory.max": "200", "memory.swap.max": "0", "memory.oom.group": "1"}
    first = MemoryGroups(1, tmp_path / "first").create("1", hard=200, die_together=True)
    assert {file.name for file in first.path.iterdir()} == {
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
    }


def v1_counts(*, kills: int, peak: int) -> dict[str, str]:
    return {
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
        "memory.limit_in_bytes": f"{100 << 20}\n",
        "memory.max_usage_in_bytes": f"{peak}\n",
    }


@pytest.mark.parametrize(
    ("files", "exceeded"),
    [
        (v1_counts(kills=1, peak=99 << 20), True),
        # The host had no memory left, or a group above.
        (v1_counts(kills=1, peak=60 << 20), False),
        (v1_counts(kills=0, peak=100 << 20), False),
        ({"memory.events": "max 9\noom 1\noom_kill 2\noom_group_kill 1\n"}, True),
        ({"memory.events": "max 0\noom 0\noom_kill 2\noom_group_kill 1\n"}, False),
        ({}, False),
    ],
)
def test_a_kill_for_the_group_s_own_limit_is_told_from_one_for_the_host_s(
    tmp_path: Path, files: dict[str, str], exceeded: bool
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert MemoryGroup(tmp_path).exceeded_limit() is exceeded


def test_another_limit_replaces_the_first_one(tmp_path: Path) -> None:
    groups = MemoryGroups(2, tmp_path / "berth")
    group = groups.create("1", hard=200)
    groups.change(group, 300)
    assert (group.path / "memory.max").read_text() == "300"
    with pytest.raises(OSError, match="No such file"):
        groups.change(MemoryGroup(tmp_path / "gone"), 300)


@pytest.mark.parametrize("name", ["memory.current", "memory.usage_in_bytes"])
def test_what_a_group_has_in_use_is_read_in_both_versions(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("4096\n")
    assert MemoryGroup(tmp_path).usage() == 4096
    with pytest.raises(FileNotFoundError):
        MemoryGroup(tmp_path / "gone").usage()


@pytest.mark.parametrize(
    ("name", "content", "kills"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
        ("memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
        ("memory.events", "low 0\n", 0),
        ("something.else", "oom_kill 9\n", 0),
    ],
)
def test_kills_by_the_kernel_are_counted_in_both_versions(
    tmp_path: Path, name: str, content: str, kills: int
) -> None:
    (tmp_path / name).write_text(content)
    assert MemoryGroup(tmp_path).oom_kills() == kills


def test_a_group_that_is_gone_has_no_members_and_counts_as_removed(tmp_path: Path) -> None:
    group = MemoryGroup(tmp_path / "gone")
    assert group.members() == []
    assert group.oom_kills() == 0
    assert group.remove()


def test_a_v1_group_lies_below_the_node_s_own(tmp_path: Path) -> None:
    own = tmp_path / "memory" / "system" / "node"
    own.mkdir(parents=True)
    facts = proc(
        tmp_path / "proc",
        cgroup="5:cpu,cpuacct:/else\n4:memory:/system/node\n0::/unified\n",
        mountinfo=mount("cgroup2", tmp_path / "unified")
        + mount("cgroup", tmp_path / "memory", options="rw,memory"),
    )
    # A plain folder keeps the files of the trial, so that its removal fails: that is not looked at.
    groups = find_groups("berth-1", proc=facts)
    assert (groups.version, groups.folder) == (1, own / "berth-1")


def test_a_mount_that_shows_only_a_container_s_part_is_understood(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    facts = proc(
        tmp_path / "proc",
        cgroup="4:memory:/docker/4711\n",
        mountinfo=mount("cgroup", tmp_path / "memory", root="/docker/4711", options="rw,memory"),
    )
    assert find_groups("berth-1", proc=facts).folder == tmp_path / "memory" / "berth-1"


def test_a_v2_group_is_given_the_memory_controller(tmp_path: Path) -> None:
    own = tmp_path / "unified" / "node"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("cpu memory\n")
    facts = proc(
        tmp_path / "proc", cgroup="0::/node\n", mountinfo=mount("cgroup2", tmp_path / "unified")
    )
    groups = find_groups("berth-1", proc=facts)
    assert (groups.version, groups.folder) == (2, own / "berth-1")
    assert (groups.folder / "cgroup.subtree_control").read_text() == "+memory"


def test_a_process_whose_parent_has_moved_to_a_leaf_makes_its_groups_next_to_that(
    tmp_path: Path,
) -> None:
    own = tmp_path / "unified" / "fleet"
    (own / LEAF).mkdir(parents=True)
    (own / LEAF / "cgroup.controllers").write_text("memory\n")
    (own / "cgroup.subtree_control").write_text("memory\n")
    facts = proc(
        tmp_path / "proc",
        cgroup=f"0::/fleet/{LEAF}\n",
        mountinfo=mount("cgroup2", tmp_path / "unified"),
    )
    assert find_groups("berth-jobs-1", proc=facts).folder == own / "berth-jobs-1"


def test_a_v2_group_without_the_memory_controller_is_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text("cpu pids\n")
    facts = proc(
        tmp_path / "proc", cgroup="0::/\n", mountinfo=mount("cgroup2", tmp_path / "unified")
    )
    with pytest.raises(LimitsUnavailable):
        find_groups("berth-1", proc=facts)


def test_a_host_that_refuses_is_reported_with_its_reason_and_keeps_no_trace(tmp_path: Path) -> None:
    with pytest.raises(LimitsUnavailable, match="No such file"):
        find_groups("berth-1", parent=tmp_path / "not-there")
    assert list(tmp_path.iterdir()) == []
