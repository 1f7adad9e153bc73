"""Several orchestrators in one data folder."""

from __future__ import annotations

from pathlib import Path

from infra.local.stack import LocalStack


def test_each_orchestrator_has_a_ready_file_a_log_and_a_record_of_its_own(folder: Path) -> None:
    stack = LocalStack(folder, orchestrators=2)
    stack.add_orchestrator(build_id="next")
    all_of_them = stack.orchestrators
    assert [orchestrator.name for orchestrator in all_of_them] == [
        "orchestrator",
        "orchestrator-2",
        "orchestrator-3",
    ]
    assert len({orchestrator.ready_file for orchestrator in all_of_them}) == 3
    assert len({orchestrator.log_path for orchestrator in all_of_them}) == 3
    environments = [orchestrator.environment() for orchestrator in all_of_them]
    assert [(environment or {})["BERTH_ORCHESTRATOR_NAME"] for environment in environments] == [
        orchestrator.name for orchestrator in all_of_them
    ]
    assert [(environment or {})["BERTH_BUILD_ID"] for environment in environments] == [
        "",
        "",
        "next",
    ]
