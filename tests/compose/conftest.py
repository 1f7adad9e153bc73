"""One project under one engine for all tests of this folder, which run in their order."""

from collections.abc import Iterator

import pytest

from infra.lab.worker_image import PackagesAbsent
from tests import needs
from tests.compose.compose_house import ComposeHouse, Customer, open_compose_house


@pytest.fixture(scope="package")
def stack() -> Iterator[ComposeHouse]:
    needs.require("compose")
    try:
        with open_compose_house() as house:
            house.up()
            yield house
            house.compose("down", "--volumes", "--timeout", "5", check=False)
    except PackagesAbsent as error:
        needs.skip("compose", str(error))


@pytest.fixture(scope="package")
def alice(stack: ComposeHouse) -> Customer:
    return stack.customer()
