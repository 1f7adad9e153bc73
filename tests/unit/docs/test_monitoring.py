"""Rules and dashboards of infra/monitoring: they name metrics that exist, and rules fire when they
should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.metrics import FAMILIES
from infra.process_metrics import COUNTED

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "infra" / "monitoring"
RULES = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))["groups"][0][
    "rules"
]
TRIED = yaml.safe_load((MONITORING / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
#: Metrics that are in neither table, with their labels: a node's, a workflow's, those of Temporal's
#: SDK.
ELSEWHERE = {
    "berth_node_workers": ("instance",),
    "berth_pool_wanted": ("pool",),
    "temporal_num_pollers": ("task_queue",),
    "temporal_workflow_failed_total": ("workflow_type",),
}
NAMES = re.compile(r"\b((?:berth|temporal)_\w+)(?:\{(.*?)\})?(?=[)\[ =]|$)")
KNOWN = {name: family.labels for name, family in (FAMILIES | COUNTED).items()} | ELSEWHERE


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for board in BOARDS:
        for panel in json.loads(board.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{board.name}: {panel['title']}", target["expr"]


def test_rules_and_dashboards_ask_for_metrics_and_labels_that_exist() -> None:
    wrong = []
    for place, expression in expressions():
        for name, matchers in NAMES.findall(expression):
            family = name if name in KNOWN else re.sub("_(bucket|count|sum)$", "", name)
            if family not in KNOWN:
                wrong.append(f"{place}: {name}")
                continue
            asked = set(re.findall(r'(\w+)=~?!?"|(\w+)!="', matchers))
            labels_asked = {by_pattern or by_value for by_pattern, by_value in asked}
            unknown = labels_asked - {*KNOWN[family], "le"}
            wrong += [f"{place}: {name} has no label {label}" for label in unknown]
        for labels in re.findall(r"by \((.*?)\)", expression):
            names = {label for name, its in KNOWN.items() if name in expression for label in its}
            unknown = set(labels.split(", ")) - {*names, "le", "job", "instance"}
            wrong += [f"{place}: grouped by {label}" for label in unknown]
    assert wrong == []


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    shown = " ".join(expression for _, expression in expressions())
    unshown = {name for name in KNOWN if name not in shown}
    # Of users' own jobs one panel is enough; the maintenance numbers that are left explain those
    # shown.
    assert unshown == {
        "berth_user_jobs_wait_seconds",
        "berth_user_jobs_run_seconds",
        "berth_user_jobs_reaped_total",
        "berth_user_jobs_late_renewals_total",
        "berth_maintenance_workers",
    }


def test_every_metric_has_a_test_that_makes_it_move() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("contract", "e2e", "integration")
        for path in (ROOT / "tests" / folder).rglob("test_*.py")
    )
    named = set(re.findall(r"berth_[a-z_]+", tests))
    assert {name for name in KNOWN if name.startswith("berth") and not _named(name, named)} == set()


def _named(name: str, named: set[str]) -> bool:
    return any(name + part in named for part in ("", "_count", "_sum", "_bucket"))


def test_every_rule_is_tried_when_it_should_fire_and_when_not() -> None:
    tried: dict[str, set[bool]] = {}
    for test in TRIED:
        for alert_test in test["alert_rule_test"]:
            tried.setdefault(alert_test["alertname"], set()).add(bool(alert_test["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in RULES}


def test_rules_say_how_urgent_they_are_and_what_is_wrong() -> None:
    def complete(rule: dict[str, Any]) -> bool:
        return rule["labels"]["severity"] in {"page", "ticket"} and bool(
            rule["annotations"]["summary"]
        )

    assert [rule["alert"] for rule in RULES if not complete(rule)] == []


@pytest.mark.needs("promtool")
def test_promtool_finds_that_the_rules_fire_as_their_tests_say() -> None:
    done = subprocess.run(
        [shutil.which("promtool") or "", "test", "rules", "rules_test.yaml"],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
