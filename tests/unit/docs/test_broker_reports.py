"""The reports of Shioaji's users in docs/reference/brokers.md: each has its test."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import ROOT

#: A row's report, and the file of its test.
_ROW = re.compile(
    r"^\| (?P<where>app |vnpy_sinopac )?#(?P<number>\d+) \|.*\| `(?P<file>[^`]+)` \|$", re.M
)
#: How a test's name says where a report is from.
_PREFIX = {None: "", "app ": "p", "vnpy_sinopac ": "vnpy"}
#: Reports that were known when the table was written.
MIN_REPORTS = 35


def rows() -> dict[str, str]:
    text = (ROOT / "docs/reference/brokers.md").read_text(encoding="utf-8")
    reports = [(_PREFIX[row["where"]] + row["number"], row["file"]) for row in _ROW.finditer(text)]
    assert len(reports) == len(dict(reports)), "a report is in two rows"
    return dict(reports)


def test_no_report_has_left_the_table() -> None:
    assert len(rows()) >= MIN_REPORTS


@pytest.mark.parametrize("report", rows())
def test_a_test_has_the_number_of_each_report_in_its_name(report: str) -> None:
    file = rows()[report]
    path = ROOT / (file if "/" in file else f"tests/contract/brokers/{file}")
    names = re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.M)
    assert any(report in name.split("_") for name in names), f"{path} has no test of {report}"
