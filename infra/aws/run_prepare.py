"""A Lambda of CloudFormation: runs the ECS task `prepare`
and waits for its end, before any service changes.

The task makes missing keys and migrates the database. When it fails, the deployment is rolled back.
This file is the function's whole code, at most 4,096 characters: it imports nothing of ours.
"""

import json
import time
import urllib.request

import boto3

#: Seconds between two looks at the task. The function itself ends after 15 minutes.
CHECK_INTERVAL_S = 5.0


def handler(event, context, *, ecs=None, pause_s=CHECK_INTERVAL_S):
    """Answers CloudFormation in any case: it would wait an hour for an answer that does not come.

    Lambda passes `event` and `context`; tests pass the others.
    """
    status, reason = "SUCCESS", ""
    try:
        if event["RequestType"] != "Delete":
            run(
                ecs or boto3.client("ecs"),
                event["ResourceProperties"],
                context.get_remaining_time_in_millis,
                pause_s,
            )
    except Exception as error:  # whatever it is, CloudFormation has to hear of it
        status, reason = "FAILED", f"{type(error).__name__}: {error}"[:500]
    answer = {
        "Status": status,
        "Reason": reason,
        "PhysicalResourceId": "prepare",
        **{name: event[name] for name in ("StackId", "RequestId", "LogicalResourceId")},
    }
    request = urllib.request.Request(
        event["ResponseURL"],
        data=json.dumps(answer).encode(),
        method="PUT",
        headers={"Content-Type": ""},
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


def run(ecs, given, milliseconds_left, pause_s):
    """Runs the task once. `given`: ARNs of cluster and task definition,
    and the capacity provider's name.

    Raises RuntimeError for a task that does not end with 0, or not in time.
    """
    launched = ecs.run_task(
        cluster=given["Cluster"],
        taskDefinition=given["TaskDefinition"],
        capacityProviderStrategy=[{"capacityProvider": given["CapacityProvider"], "weight": 1}],
        startedBy="cloudformation",
    )
    if not launched["tasks"]:
        raise RuntimeError(f"the task was not placed: {launched['failures']}")
    arn = launched["tasks"][0]["taskArn"]
    while milliseconds_left() > 30_000:
        tasks = ecs.describe_tasks(cluster=given["Cluster"], tasks=[arn])["tasks"]
        task = tasks[0] if tasks else {"lastStatus": "PROVISIONING"}  # ECS may not show it yet
        if task["lastStatus"] == "STOPPED":
            codes = [container.get("exitCode") for container in task["containers"]]
            if codes != [0]:
                raise RuntimeError(
                    f"it ended with {codes}: {task.get('stoppedReason', '')}; see its log"
                )
            return
        time.sleep(pause_s)
    raise RuntimeError("it still runs after 15 minutes; see its log")
