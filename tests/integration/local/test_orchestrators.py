"""Several orchestrators in one data folder."""

from __future__ import annotations

from pathlib import Path

from infra.local.stack import LocalStack


def test_each_orchestrator_has_a_ready_file_a_log_and_a_record_of_its_own(folder: Path) -> None:
    stack = LocalStack(folder, orchestrators=2)
    stack.add_orchestrator(build_id="next")
    all_of_them = stack.orchestrators
    assert [one.name for one in all_of_them] == ["orchestrator", "orchestrator-2", "orchestrator-3"]
    assert len({one.ready_file for one in all_of_them}) == 3
    assert len({one.log_path for one in all_of_them}) == 3
    found = [one.environment() for one in all_of_them]
    assert [(one or {})["BERTH_ORCHESTRATOR_NAME"] for one in found] == [
        one.name for one in all_of_them
    ]
    assert [(one or {})["BERTH_BUILD_ID"] for one in found] == ["", "", "next"]
