"""One project under one engine for all tests of this folder, which run in their order."""

from collections.abc import Generator, Iterator

import pytest

from infra.lab.worker_image import PackagesAbsent
from tests.support import needs
from tests.support.systems.compose import ComposeProject, Customer, open_compose_project


@pytest.fixture(scope="package")
def stack() -> Iterator[ComposeProject]:
    needs.require("compose")
    try:
        with open_compose_project() as system:
            system.up()
            yield system
            system.compose("down", "--volumes", "--timeout", "5", check=False)
    except PackagesAbsent as error:
        needs.skip("compose", str(error))


@pytest.fixture(scope="package")
def alice(stack: ComposeProject) -> Customer:
    return stack.customer()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the state of all containers, and the last lines of each, to the report of a failed
    test."""
    report = yield
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.failed and isinstance(stack, ComposeProject):
        report.sections.append(("containers", stack.compose("ps", "--all", check=False)))
        logs = stack.compose("logs", "--no-color", "--tail", "25", check=False)
        report.sections.append(("last lines of each container", logs))
    return report
