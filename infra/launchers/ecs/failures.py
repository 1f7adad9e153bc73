"""ECS's refusals as errors with codes.

RunTask fails in two ways: by an exception, and by a good answer (HTTP 200) whose `failures` say why
no task was placed.
https://docs.aws.amazon.com/AmazonECS/latest/developerguide/api_failures_messages.html
"""

from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from infra.worker_task import LauncherUnreachable, LaunchFailed
from worker_runtime.protocol.errors import BerthError


class NoCapacity(LaunchFailed, code="LAUNCH_NO_CAPACITY"):
    """The cluster has no room for another worker now."""


class HostUnavailable(LaunchFailed, code="LAUNCH_HOST_UNAVAILABLE"):
    """The host chosen for the worker does not answer ECS, or leaves the cluster."""


class LaunchThrottled(LaunchFailed, code="LAUNCH_THROTTLED"):
    """Workers are launched faster than the platform allows."""


class LaunchMisconfigured(LaunchFailed, code="LAUNCH_MISCONFIGURED", retryable=False):
    """The platform cannot launch this, now or later: settings or task definition are wrong."""


class LaunchDenied(LaunchFailed, code="LAUNCH_DENIED", retryable=False):
    """The platform does not allow us to launch: credentials, role or account."""


class TokenInUse(BerthError, code="LAUNCH_TOKEN_IN_USE"):
    """The token belongs to a launch with other parameters; its tasks are known."""

    def __init__(self, detail: str, task_ids: tuple[str, ...]) -> None:
        super().__init__(detail)
        self.task_ids = task_ids


class UnknownTask(BerthError, code="UNKNOWN_TASK"):
    """ECS does not know the task: it never was,
    ended more than an hour ago, or is not visible yet."""


#: AWS's protocols have several codes for the same refusal. All mean that nothing was done.
_REFUSALS: dict[type[LaunchFailed], str] = {
    LaunchThrottled: "ThrottlingException Throttling RequestLimitExceeded "
    "TooManyRequestsException SlowDown",
    LaunchDenied: "AccessDeniedException AccessDenied BlockedException ExpiredTokenException "
    "ExpiredToken InvalidClientTokenId InvalidSignatureException NotAuthorized OptInRequired "
    "UnrecognizedClientException",
    LaunchMisconfigured: "ClusterNotFoundException InvalidParameterException "
    "PlatformUnknownException PlatformTaskDefinitionIncompatibilityException "
    "UnsupportedFeatureException ValidationException",
}
_BY_CODE = {code: kind for kind, codes in _REFUSALS.items() for code in codes.split()}
#: Words in the message of a `ClientException` that mean a passing lack: of the cluster's quota of
#: tasks in PROVISIONING, of the account's quota of running tasks, or of room on Fargate.
_CAPACITY_WORDS = ("capacity", "provisioning", "limit on the number of tasks")


def placement_error(failure: dict[str, Any]) -> LaunchFailed:
    """Returns the error for one item of RunTask's `failures`."""
    reason = str(failure.get("reason") or "no reason given")
    text = f"{reason}: {failure['detail']}" if failure.get("detail") else reason
    text = text[:300]
    if reason.startswith("RESOURCE") or _names_capacity(reason):
        return NoCapacity(text)
    if reason in ("AGENT", "INACTIVE"):
        return HostUnavailable(text)
    # MISSING, ATTRIBUTE, LOCATION and reasons to come: ECS would answer the same again.
    return LaunchMisconfigured(text)


def launch_error(error: Exception) -> BerthError:
    """Returns the error for an exception of RunTask; `LauncherUnreachable` when the launch may have
    worked."""
    if isinstance(error, NoCredentialsError):
        return LaunchDenied(_detail_of(error))
    if not isinstance(error, ClientError):
        return LauncherUnreachable(_detail_of(error))
    code, text = _code(error), _detail_of(error)
    if code == "ConflictException":
        return TokenInUse(
            text, tuple(task_id_of(arn) for arn in error.response.get("resourceIds", ()))
        )
    if code == "ClientException":
        return NoCapacity(text) if _names_capacity(text) else LaunchMisconfigured(text)
    return _BY_CODE.get(code, LauncherUnreachable)(text)


def call_error(error: Exception) -> BerthError:
    """Returns the error for an exception of any other call: `UnknownTask`, or
    `LauncherUnreachable`."""
    if isinstance(error, ClientError) and _code(error) == "InvalidParameterException":
        text = _detail_of(error).lower()
        # "The referenced task was not found.", "taskId length should be one of [32,36]"
        if "task was not found" in text or "taskid" in text or "task id" in text:
            return UnknownTask(_detail_of(error))
    return LauncherUnreachable(_detail_of(error))


def task_id_of(arn: str) -> str:
    """Returns the `id` of `arn:aws:ecs:region:account:task/cluster/id`; the older form lacks the
    cluster."""
    return arn.rpartition("/")[2]


def _names_capacity(text: str) -> bool:
    return any(word in text.lower() for word in _CAPACITY_WORDS)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _detail_of(error: Exception) -> str:
    if isinstance(error, ClientError):
        return f"{_code(error)}: {error.response.get('Error', {}).get('Message', '')}"[:300]
    return (
        f"{type(error).__name__}: {error}"[:300]
        if isinstance(error, BotoCoreError)
        else repr(error)[:300]
    )
