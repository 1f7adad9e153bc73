"""ECS and SQS as moto's server plays them, with what moto leaves out, in threads of the tests.

moto checks requests and keeps tasks, queues and messages. It runs nothing, knows no `clientToken`,
no pages, no versions and no times, and is never late. This is added here, as the API reference
describes it; a task's life is driven by `crash`, and by StopTask.
"""

from __future__ import annotations

import io
import itertools
import json
import socket
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_api import state_manager
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

REGION = "ap-northeast-1"
CLUSTER, FAMILY, CONTAINER = "berth", "berth-worker", "worker"
#: Seconds of the longest poll: real ones only make tests slow.
LONGEST_POLL = 0.3

_ECS = "AmazonEC2ContainerServiceV20141113."
Answer = tuple[int, dict[str, Any]]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any, **__: Any) -> None:
        """Nothing."""


@dataclass
class EcsTaskLife:
    """What ECS adds to a task."""

    created_at: float
    version: int = 1
    status: str = "RUNNING"
    desired: str = "RUNNING"
    stopped_at: float = 0.0
    stop_code: str = ""
    reason: str = ""
    exit_code: int | None = None
    container_reason: str = ""


@dataclass
class Faults:
    """What goes wrong; empty: nothing."""

    #: Operation → answers given instead of doing anything, one a call.
    answers: dict[str, deque[Answer]] = field(default_factory=lambda: defaultdict(deque))
    #: Operations that are done once, and whose answer is lost: the connection is cut.
    lost: set[str] = field(default_factory=set)
    #: Ids that listings lack, and that ECS denies altogether.
    unlisted: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    #: While True, listings are empty.
    empty_listings: bool = False
    #: Tasks that do not end when they are stopped.
    stubborn: bool = False
    #: While True, nobody hears of changes.
    mute: bool = False


class EcsOnMoto:
    """`with EcsOnMoto() as aws:` a server with one cluster and one task definition."""

    def __init__(self) -> None:
        self.faults = Faults()
        #: Calls by operation, and the requests of RunTask.
        self.calls: dict[str, int] = defaultdict(int)
        #: Bytes of the answers of ECS, without those of RunTask.
        self.answered_bytes = 0
        self.requests: list[dict[str, Any]] = []
        self.queues: list[str] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lives: dict[str, EcsTaskLife] = {}
        self._tokens: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._turn = threading.RLock()
        self._news = threading.Condition()
        self._last = 0.0
        self._numbers = itertools.count(1)
        state_manager.set_transition("ecs::task", {"progression": "manual", "times": 10**9})

    def __enter__(self) -> EcsOnMoto:
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        self.ecs = boto3.client("ecs", REGION, endpoint_url=self.url)
        self.sqs = boto3.client("sqs", REGION, endpoint_url=self.url)
        self.ecs.create_cluster(clusterName=CLUSTER)
        self.ecs.register_task_definition(
            family=FAMILY,
            containerDefinitions=[{"name": CONTAINER, "image": "berth-worker", "memory": 1024}],
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.ecs.close()
        self.sqs.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        state_manager.unset_transition("ecs::task")

    def queue(self) -> str:
        """A new queue that hears of every change; its URL."""
        url: str = self.sqs.create_queue(QueueName=f"events-{uuid.uuid4().hex}")["QueueUrl"]
        self.queues.append(url)
        return url

    def forget_tokens(self) -> None:
        """As ECS does after 24 hours."""
        self._tokens.clear()

    def send(self, queue: str, body: str) -> None:
        self.sqs.send_message(QueueUrl=queue, MessageBody=body)
        with self._news:
            self._news.notify_all()

    def left(self, queue: str) -> int:
        """Messages that nobody has deleted, those under way included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        reported = self.sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
        return sum(int(reported[name]) for name in names)

    def crash(self, task_id: str, exit_code: int | None = 137, **how: Any) -> None:
        """The worker's container ends by itself. `how` sets other fields of its life."""
        self._end(
            task_id,
            "EssentialContainerExited",
            "Essential container in task exited",
            exit_code,
            **how,
        )

    def event(self, task_id: str) -> str:
        """The state change event of the task's present state, as EventBridge gives it to the
        queue."""
        task = self._task(task_id)
        for name in ("createdAt", "stoppedAt", "stoppingAt"):
            if name in task:
                task[name] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(task[name])) + (
                    f".{round(task[name] % 1 * 1000):03d}Z"
                )
        task.pop("tags", None)
        return json.dumps(
            {
                "version": "0",
                "id": str(uuid.uuid4()),
                "detail-type": "ECS Task State Change",
                "source": "aws.ecs",
                "account": DEFAULT_ACCOUNT_ID,
                "time": "2026-11-20T01:02:03Z",
                "region": REGION,
                "resources": [task["taskArn"]],
                "detail": task,
            }
        )

    # --- a task's life ----------------------------------------------------------------------------

    def _end(self, task_id: str, code: str, reason: str, exit_code: int | None, **how: Any) -> None:
        with self._turn:
            life = self._lives[task_id]
            if life.status == "STOPPED":
                return
            life.status = life.desired = "STOPPED"
            life.stopped_at, life.stop_code, life.reason, life.exit_code = (
                self._now(),
                code,
                reason,
                exit_code,
            )
            for name, value in how.items():
                setattr(life, name, value)
            life.version += 1
        self._publish(task_id)

    def _publish(self, task_id: str) -> None:
        if not self.faults.mute:
            body = self.event(task_id)
            for queue in self.queues:
                self.send(queue, body)

    def _now(self) -> float:
        """Unix seconds, in whole milliseconds, never the same twice."""
        self._last = max(round(time.time(), 3), round(self._last + 0.001, 3))
        return self._last

    def _task(self, task_id: str) -> dict[str, Any]:
        _, answer = self._forward(
            "DescribeTasks", {"cluster": CLUSTER, "tasks": [task_id], "include": ["TAGS"]}
        )
        return self._lived(answer["tasks"][0])

    def _lived(self, task: dict[str, Any]) -> dict[str, Any]:
        life = self._lives[_id(task["taskArn"])]
        task |= {
            "createdAt": life.created_at,
            "version": life.version,
            "lastStatus": life.status,
            "desiredStatus": life.desired,
        }
        task["containers"] = [{"name": CONTAINER, "lastStatus": life.status}]
        if life.status == "STOPPED":
            task |= {
                "stoppedAt": life.stopped_at,
                "stopCode": life.stop_code,
                "stoppedReason": life.reason,
            }
            if life.exit_code is not None:
                task["containers"][0]["exitCode"] = life.exit_code
            if life.container_reason:
                task["containers"][0]["reason"] = life.container_reason
        return task

    # --- operations -------------------------------------------------------------------------------

    def _run_task(self, request: dict[str, Any]) -> Answer:
        self.requests.append(request)
        token = request.get("clientToken", "")
        if token in self._tokens:
            before, answer = self._tokens[token]
            if before != request:
                arns = [task["taskArn"] for task in answer["tasks"]]
                text = (
                    "The provided clientToken is already in use with a different RunTask request."
                )
                return 400, {"__type": "ConflictException", "message": text, "resourceIds": arns}
            return 200, answer
        status, answer = self._forward("RunTask", request)
        if status == 200:
            for task in answer["tasks"]:
                self._lives[_id(task["taskArn"])] = EcsTaskLife(
                    created_at=self._now(), status="PROVISIONING"
                )
                self._lived(task)
            self._tokens[token] = request, json.loads(json.dumps(answer))
            for task in answer["tasks"]:
                self._lives[_id(task["taskArn"])].status = "RUNNING"
        return status, answer

    def _describe_tasks(self, request: dict[str, Any]) -> Answer:
        task_ids = [_id(task) for task in request["tasks"]]
        assert len(task_ids) <= 100
        if any(len(task_id) not in (32, 36) for task_id in task_ids):
            return _invalid("taskId length should be one of [32,36]")
        known = [
            task_id
            for task_id in task_ids
            if task_id in self._lives and task_id not in self.faults.denied
        ]
        answer: dict[str, Any] = {"tasks": [], "failures": []}
        if known:
            _, answer = self._forward("DescribeTasks", {**request, "tasks": known})
            for task in answer["tasks"]:
                self._lived(task)
        prefix = f"arn:aws:ecs:{REGION}:{DEFAULT_ACCOUNT_ID}:task/{CLUSTER}/"
        answer["failures"] = [
            {"arn": prefix + task_id, "reason": "MISSING"} for task_id in set(task_ids) - set(known)
        ]
        return 200, answer

    def _list_tasks(self, request: dict[str, Any]) -> Answer:
        desired = request.pop("desiredStatus", "RUNNING")
        size, start = request.pop("maxResults", 100), int(request.pop("nextToken", 0))
        assert size <= 100
        status, answer = self._forward("ListTasks", request)
        if status != 200:
            return status, answer
        # moto keeps tasks of earlier tests, too.
        shown = self._lives.keys() - self.faults.unlisted - self.faults.denied
        arns = sorted(arn for arn in answer["taskArns"] if _id(arn) in shown)
        arns = [arn for arn in arns if self._lives[_id(arn)].desired == desired]
        arns = [] if self.faults.empty_listings else arns
        answer["taskArns"] = arns[start : start + size]
        if len(arns) > start + size:
            answer["nextToken"] = str(start + size)
        return 200, answer

    def _stop_task(self, request: dict[str, Any]) -> Answer:
        task_id = _id(request["task"])
        if len(task_id) not in (32, 36):
            return _invalid("taskId length should be one of [32,36]")
        if task_id not in self._lives or task_id in self.faults.denied:
            return _invalid("The referenced task was not found.")
        self._lives[task_id].desired = "STOPPED"
        if not self.faults.stubborn:
            self._end(task_id, "UserInitiated", request.get("reason", ""), 0)
        return 200, {"task": self._task(task_id)}

    # --- the wire ---------------------------------------------------------------------------------

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        operation = target.rpartition(".")[2]
        self.calls[operation] += 1
        if operation == "ReceiveMessage":
            return self._poll(environ, body, start_response)
        handlers: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "RunTask": self._run_task,
            "DescribeTasks": self._describe_tasks,
            "ListTasks": self._list_tasks,
            "StopTask": self._stop_task,
        }
        if not target.startswith(_ECS) or operation not in handlers:
            made: Iterable[bytes] = self._moto(
                {**environ, "wsgi.input": io.BytesIO(body)}, start_response
            )
            return made
        self._environ = environ
        if self.faults.answers[operation]:
            status, answer = self.faults.answers[operation].popleft()
        else:
            with self._turn:
                status, answer = handlers[operation](json.loads(body))
            if operation in self.faults.lost:
                self.faults.lost.discard(operation)
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start_response(f"{status} .", [("Content-Type", "application/x-amz-json-1.1")])
        body = json.dumps(answer).encode()
        self.answered_bytes += 0 if operation == "RunTask" else len(body)
        return [body]

    def _poll(
        self, environ: dict[str, Any], body: bytes, start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        raw = json.dumps({**json.loads(body), "WaitTimeSeconds": 0}).encode()
        deadline = time.monotonic() + LONGEST_POLL
        while True:
            head, answer = self._ask(environ, raw)
            if b"Messages" in answer or time.monotonic() > deadline:
                start_response(*head)
                return [answer]
            with self._news:
                self._news.wait(0.02)

    def _forward(self, operation: str, request: dict[str, Any]) -> Answer:
        environ = {**self._environ, "HTTP_X_AMZ_TARGET": _ECS + operation}
        head, answer = self._ask(environ, json.dumps(request).encode())
        return int(head[0].split()[0]), json.loads(answer)

    def _ask(self, environ: dict[str, Any], raw: bytes) -> tuple[tuple[Any, ...], bytes]:
        given: list[tuple[Any, ...]] = []
        made = self._moto(
            {**environ, "wsgi.input": io.BytesIO(raw), "CONTENT_LENGTH": str(len(raw))},
            lambda *head: given.append(head),
        )
        return given[0], b"".join(made)


def _id(arn: str) -> str:
    return arn.rpartition("/")[2]


def _invalid(message: str) -> Answer:
    return 400, {"__type": "InvalidParameterException", "message": message}
