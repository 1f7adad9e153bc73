"""The API does what its OpenAPI description says, whatever is sent to it (by schemathesis).

Half of the examples go to a user, an account and an order that are there, the rest anywhere; half
of the bodies and parameters fit their schema, the rest do not.

A short form runs with the suite, always with the same examples. `BERTH_FUZZ_EXAMPLES=240` is the
long one, about ten minutes with other examples each time; it needs `-o faulthandler_timeout=3600`,
because a single test of the suite may take 600 s at most.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from temporalio.service import RPCError

from api.http.errors import PoolRebuilding
from infra.temporal.client import OrchestratorUnavailable
from tests.support.api.scripted_answers import answer_anything
from tests.support.systems.api import ServedApi, StartWorker, an_order, served
from tests.support.workflows.user_worker_stub import LifecycleStub
from workflows.names import worker_pool_id

Operation = APIOperation[Any, Any, Any, Any]

#: For each operation, of all kinds. To make them up is what takes the time: about 30 ms each.
EXAMPLES = int(os.environ.get("BERTH_FUZZ_EXAMPLES", "12"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + EXAMPLES * 10)]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
#: Seconds for which a request may ask to wait.
LONGEST_WAIT = 120
#: Seconds; a request that takes longer is a finding. All take far less, also where the machine
#: stands still for a while.
PATIENCE = 40.0


class ContractCaller:
    """Calls as this one and that, and collects what is wrong with the answers."""

    def __init__(
        self,
        url: str,
        keys: Sequence[str],
        known: dict[str, Any],
        checks: Sequence[Callable[..., Any]] = CHECKS,
    ) -> None:
        self._url = url
        self._checks = list(checks)
        self._keys = keys
        self._known = known
        self.faults: dict[str, str] = {}
        self.statuses: Counter[int] = Counter()

    def run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self._try(operation)

    def _try(self, operation: Operation) -> None:
        @settings(
            max_examples=EXAMPLES,
            derandomize="BERTH_FUZZ_EXAMPLES" not in os.environ,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=self._cases(operation), key=st.sampled_from(self._keys))
        def each(case: Case[Any], key: str) -> None:
            self._check(operation.label, case, key)

        each()

    def _cases(self, operation: Operation) -> st.SearchStrategy[Case[Any]]:
        names = {parameter.name for parameter in operation.path_parameters}
        there = {name: value for name, value in self._known.items() if name in names}
        kinds = [operation.as_strategy(mode) for mode in GenerationMode]
        if there:
            kinds += [operation.as_strategy(mode, path_parameters=there) for mode in GenerationMode]
        return st.one_of(kinds)

    def _checks_of(self, answer: Response, *, waits: bool) -> list[Callable[..., Any]]:
        """That nobody did it, within so short a wait or ever, is no error of the server's."""
        refused = answer.json()["code"] if answer.status_code == 503 else ""
        unanswered = answer.status_code == 504 or refused == OrchestratorUnavailable.code
        # Another test may have ended the pool's workflow, and nobody rebuilds it here.
        undone = (waits and unanswered) or refused == PoolRebuilding.code
        return [check for check in self._checks if not (undone and check is not_a_server_error)]

    def _check(self, label: str, case: Case[Any], key: str) -> None:
        wait = (case.query or {}).get("wait")
        waits = any(parameter.name == "wait" for parameter in case.operation.query)
        long = isinstance(wait, int | float) and 0.1 < wait <= LONGEST_WAIT
        if waits and (wait is None or long):  # for what nobody ever does
            case.query = {**(case.query or {}), "wait": 0.1}
        try:
            answer = case.call(
                base_url=self._url,
                headers={"X-API-Key": key},
                timeout=PATIENCE,
                proxies={"http": None},
            )
        except OSError as error:  # what the client raises is one
            self.faults.setdefault(f"{label}: no answer", f"{error} to {case.as_curl_command()}")
            return
        self.statuses[answer.status_code] += 1
        description = f"{answer.status_code} {answer.text[:300]} to {case.as_curl_command()}"
        try:
            case.validate_response(answer, checks=self._checks_of(answer, waits=waits))
        except FailureGroup as group:
            for cause in group.exceptions:
                self.faults.setdefault(
                    f"{label}: {type(cause).__name__}", f"{cause}: {description}"
                )
        except Failure as failure:
            self.faults.setdefault(
                f"{label}: {type(failure).__name__}", f"{failure}: {description}"
            )
        if answer.status_code >= 400:
            problem = "application/problem+json" in answer.headers["content-type"]
            if not problem or not answer.json().get("code"):
                self.faults.setdefault(f"{label}: no problem with a code", description)


async def test_every_operation_keeps_to_its_description(
    whole_api: ServedApi, lifecycle: LifecycleStub, start_worker: StartWorker
) -> None:
    api = whole_api
    worker = await start_worker(api.user)
    worker.reply = answer_anything
    async with api.client(api.key) as user:
        order = (await user.post(f"/users/{api.user}/orders", json=an_order())).json()
        hook = (
            await user.post(
                f"/users/{api.user}/webhooks", json={"account_id": "main", "quantity_unit": "lots"}
            )
        ).json()
    known = {
        "user_id": api.user,
        "account_id": "main",
        "order_id": order["id"],
        "symbol": "2330",
        "number": 1,
        "token": hook["token"],
        "webhook_id": str(uuid4()),
    }
    described = openapi.from_dict(api.app.openapi())
    # Streams have no end. A rollout asks the pool's workflow, and waits 10 s for it where another
    # test has left one that nobody serves: its routes have a test of their own.
    finite = described.exclude(path_regex="/events$|/rollout")
    async with served(api) as url:
        # Temporal is shared with tests of the pool, which may have left theirs.
        with suppress(RPCError):
            await api.services.pools.client.get_workflow_handle(
                worker_pool_id("default")
            ).terminate()
        caller = ContractCaller(url.removesuffix("/v1"), [api.key, api.admin_key], known)
        operations = [
            result.ok() for result in finite.get_all_operations() if isinstance(result, Ok)
        ]
        await asyncio.to_thread(caller.run, operations)
    assert caller.statuses.total() > 10 * len(operations)
    # Not all is refused at the door.
    assert {200, 201, 403, 404, 422} <= set(caller.statuses), caller.statuses
    assert caller.faults == {}, "\n".join(
        f"{name}\n    {description}" for name, description in caller.faults.items()
    )


async def test_the_routes_of_a_rollout_keep_to_it_when_nobody_can_carry_one_out(
    api: ServedApi,
) -> None:
    """Temporal is down: what is asked for well is a 503 as described, everything else refused as
    ever."""
    described = openapi.from_dict(api.app.openapi()).include(path_regex="/rollout")
    described_codes = [check for check in CHECKS if check is not not_a_server_error]
    async with served(api) as url:
        caller = ContractCaller(
            url.removesuffix("/v1"), [api.key, api.admin_key], {"pool": "default"}, described_codes
        )
        operations = [
            result.ok() for result in described.get_all_operations() if isinstance(result, Ok)
        ]
        await asyncio.to_thread(caller.run, operations)
    assert len(operations) == 3
    assert {403, 422, 503} <= set(caller.statuses) <= {401, 403, 404, 405, 422, 503}, (
        caller.statuses
    )
    assert caller.faults == {}, "\n".join(
        f"{name}\n    {description}" for name, description in caller.faults.items()
    )
