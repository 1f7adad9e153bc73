"""The function that runs the task `prepare` for CloudFormation, on a simulated ECS."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from infra.aws import run_prepare

EVENT = {
    "RequestType": "Create",
    "StackId": "s",
    "RequestId": "r",
    "LogicalResourceId": "l",
    "ResourceProperties": {"Cluster": "c", "TaskDefinition": "t:1", "CapacityProvider": "p"},
}


class ScriptedEcs:
    """Answers as ECS does: the task runs for a while, then it has stopped."""

    def __init__(
        self, code: int | None, *, placed: bool = True, looks: int = 2, unseen: int = 0
    ) -> None:
        """`unseen`: looks at which ECS does not show the task yet."""
        self.unseen = unseen
        self.code = code
        self.placed = placed
        self.looks = looks
        self.launched: list[dict[str, Any]] = []

    def run_task(self, **request: Any) -> dict[str, Any]:
        self.launched.append(request)
        if not self.placed:
            return {"tasks": [], "failures": [{"reason": "RESOURCE:MEMORY"}]}
        return {"tasks": [{"taskArn": "arn"}], "failures": []}

    def describe_tasks(self, **_: Any) -> dict[str, Any]:
        self.unseen -= 1
        if self.unseen >= 0:
            return {"tasks": [], "failures": [{"arn": "arn", "reason": "MISSING"}]}
        self.looks -= 1
        if self.looks > 0:
            return {"tasks": [{"lastStatus": "RUNNING", "containers": [{}]}]}
        container = {} if self.code is None else {"exitCode": self.code}
        return {
            "tasks": [
                {"lastStatus": "STOPPED", "containers": [container], "stoppedReason": "no image"}
            ]
        }


def answer_to(
    ecs: ScriptedEcs,
    *,
    kind: str = "Create",
    remaining_ms: int = 900_000,
) -> dict[str, Any]:
    """Runs the function, and returns what it answers to CloudFormation."""
    answers: list[dict[str, Any]] = []

    class AnswerReceiver(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = HTTPServer(("127.0.0.1", 0), AnswerReceiver)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    context = SimpleNamespace(get_remaining_time_in_millis=lambda: remaining_ms)
    url = f"http://127.0.0.1:{server.server_port}/answer"
    try:
        event = {**EVENT, "RequestType": kind, "ResponseURL": url}
        run_prepare.handler(event, context, ecs=ecs, pause_s=0.01)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    [answer] = answers
    return answer


def test_a_task_that_ends_with_0_lets_the_deployment_continue() -> None:
    ecs = ScriptedEcs(0)
    answer = answer_to(ecs)
    assert answer["Status"] == "SUCCESS"
    assert (answer["StackId"], answer["RequestId"], answer["LogicalResourceId"]) == ("s", "r", "l")
    [request] = ecs.launched
    assert request["taskDefinition"] == "t:1"
    assert request["capacityProviderStrategy"] == [{"capacityProvider": "p", "weight": 1}]


def test_a_task_that_ecs_does_not_show_yet_is_waited_for() -> None:
    assert answer_to(ScriptedEcs(0, unseen=2))["Status"] == "SUCCESS"


@pytest.mark.parametrize(
    ("ecs", "reason"),
    [
        (ScriptedEcs(1), "ended with [1]"),
        (ScriptedEcs(None), "no image"),
        (ScriptedEcs(0, placed=False), "RESOURCE:MEMORY"),
    ],
    ids=["failed", "never started", "not placed"],
)
def test_a_task_that_fails_rolls_the_deployment_back(ecs: ScriptedEcs, reason: str) -> None:
    answer = answer_to(ecs)
    assert answer["Status"] == "FAILED"
    assert reason in answer["Reason"]


def test_a_task_that_never_ends_fails_before_the_function_does() -> None:
    answer = answer_to(ScriptedEcs(0, looks=10**6), remaining_ms=20_000)
    assert "still runs" in answer["Reason"]


def test_a_deletion_runs_nothing() -> None:
    ecs = ScriptedEcs(0)
    assert answer_to(ecs, kind="Delete")["Status"] == "SUCCESS"
    assert ecs.launched == []


def test_the_code_fits_into_a_template() -> None:
    assert len(Path(run_prepare.__file__).read_text("utf-8")) <= 4096
