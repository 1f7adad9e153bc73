"""The decorator `job`: makes a type of job out of a function with annotated arguments.

The function stays callable. Arguments and results are JSON: plain types, msgspec structs,
dataclasses, and pydantic models, which are recognised by `model_validate` and `model_json_schema`
without importing pydantic.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import msgspec

P = ParamSpec("P")
R = TypeVar("R")

#: Errors after which another attempt makes sense, unless the type names its own.
DEFAULT_RETRY_ON: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError)
#: Bytes that a job's processes may have in memory.
DEFAULT_MEMORY_BYTES = 512 * 1024 * 1024
MAX_PRIORITY = 9
#: Seconds: a day, and a year for a key that makes jobs unique.
MAX_TIMEOUT_S = MAX_BACKOFF_S = 86_400.0
MAX_UNIQUE_FOR_S = 366 * 86_400.0
MAX_ATTEMPTS = 1000
MAX_CONCURRENCY = 1000

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_QUEUE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_TEXT = re.compile(r"[ -~]{1,128}")
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RATE = re.compile(r"(\d{1,9})/(s|min|h)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class BadDeclaration(TypeError):
    """A job cannot be declared like this. The text names the function and says what to change."""


class DeclaredJob(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a type of job, as its function declares it. Durations are seconds.

    An option that is None has the default of the deployment: a timeout of 180 s, 10 attempts, 120 s
    between two of them.
    """

    #: Without the application.
    name: str
    #: Raise it when jobs of the version before would no longer fit.
    #: Both run side by side during a rollout.
    version: int = 1
    queue: str = "default"
    #: 0 to 9; higher runs earlier.
    priority: int = 5
    timeout: float | None = None
    #: Bytes that the job and what it starts may have in memory.
    memory: int = DEFAULT_MEMORY_BYTES
    max_attempts: int | None = None
    retry_on: tuple[type[BaseException], ...] = DEFAULT_RETRY_ON
    #: Pauses before the second attempt, the third and so on; the last one repeats.
    backoff: tuple[float, ...] = ()
    #: True if it may run again after its process or runner has died in the middle.
    idempotent: bool = False
    #: Jobs of one group run one after the other; `{argument}` stands for the value of an argument,
    #: or for its default.
    group: str = ""
    #: While this time lasts, or until the job has ended, no other job with the same arguments,
    #: defaults included, is accepted; 0: no limit.
    unique_for: float = 0.0
    #: The name of the type that is enqueued with the failure once a job has failed for good.
    on_failed: str = ""
    #: Such as `100/min`.
    rate: str = ""
    #: Jobs of this type that run at once everywhere, and on one node; 0: no limit.
    max_running: int = 0
    max_running_per_node: int = 0
    #: The names of the secrets that the job is given.
    secrets: tuple[str, ...] = ()
    #: Jobs that one process runs at once; more than 1 only for async functions.
    concurrency: int = 1
    #: The struct of the arguments: a field for each parameter of the function.
    arguments: type[msgspec.Struct]
    function: Callable[..., Any]

    @property
    def is_async(self) -> bool:
        return _is_async(self.function)

    @property
    def rate_interval_ms(self) -> float:
        """Milliseconds between two jobs of this type; 0 without a rate."""
        return parse_rate(self.rate) if self.rate else 0.0

    def key_defaults(self) -> dict[str, Any]:
        """Returns the defaults of the arguments that make a job's group or unique key, as JSON has
        them.

        Leaves out those that are no JSON, or hold the character NUL, which no job can have.
        """
        defaults = {}
        for parameter in inspect.signature(self.function).parameters.values():
            makes_key = self.unique_for or f"{{{parameter.name}}}" in self.group
            if parameter.default is parameter.empty or not makes_key:
                continue
            try:
                encoded = msgspec.json.encode(
                    parameter.default, enc_hook=_encode_model, order="deterministic"
                )
            except (TypeError, ValueError, NotImplementedError, RecursionError):
                continue
            if b"\\u0000" not in encoded:
                defaults[parameter.name] = msgspec.json.decode(encoded)
        return defaults

    def encode_arguments(self, *args: Any, **kwargs: Any) -> bytes:
        """Returns a call's arguments as JSON; raises `TypeError` or `msgspec.ValidationError`.

        The values are checked against the annotations, so that a wrong call fails at the caller.
        """
        encoded = encode_value(_bind(self.function, args, kwargs))
        self.decode_arguments(encoded)
        return encoded

    def decode_arguments(self, raw: bytes | msgspec.Raw) -> msgspec.Struct:
        """Returns the arguments of a job; raises `msgspec.ValidationError` if they do not fit."""
        decoded: msgspec.Struct = _decoder(self.arguments).decode(raw)
        return decoded

    def call(self, arguments: msgspec.Struct) -> Any:
        """Calls the function; returns its result, or its coroutine if it is async."""
        return self.function(
            **{name: getattr(arguments, name) for name in arguments.__struct_fields__}
        )


class JobFunction(Generic[P, R]):
    """A function that is a type of job: callable as before, with its declaration as `type`."""

    def __init__(self, function: Callable[P, R], declared: DeclaredJob) -> None:
        self.type = declared
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.type.name}>"


_declared: list[JobFunction[..., Any]] = []


def declared_jobs() -> list[JobFunction[..., Any]]:
    """Returns all jobs that were declared in this process, in their order."""
    return list(_declared)


@overload
def job(function: Callable[P, R], /) -> JobFunction[P, R]: ...


@overload
def job(
    *,
    name: str = "",
    version: int = 1,
    queue: str = "default",
    priority: int = 5,
    timeout: float | None = None,
    memory: int = DEFAULT_MEMORY_BYTES,
    max_attempts: int | None = None,
    retry_on: type[BaseException] | Sequence[type[BaseException]] = DEFAULT_RETRY_ON,
    backoff: float | Sequence[float] = (),
    idempotent: bool = False,
    group: str = "",
    unique_for: float = 0.0,
    on_failed: str | JobFunction[..., Any] = "",
    rate: str = "",
    max_running: int = 0,
    max_running_per_node: int = 0,
    secrets: Sequence[str] = (),
    concurrency: int = 1,
) -> Callable[[Callable[P, R]], JobFunction[P, R]]: ...


def job(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declares a function as a type of job. Raises `BadDeclaration`.

    Use it bare (`@job`) or with options (`@job(queue="images")`); `DeclaredJob` says what each one
    means. The default name is the last part of the module and the function's name:
    `jobs.resize_image`.
    """
    if function is None:
        return lambda decorated: _declare(decorated, options)
    return _declare(function, options)


def parse_rate(rate: str) -> float:
    """Returns the milliseconds between two jobs
    at a rate such as `100/min`; raises `ValueError`."""
    match = _RATE.fullmatch(rate)
    if match is None or int(match[1]) == 0:
        raise ValueError("a rate is a number and a unit: 5/s, 100/min or 2000/h")
    return 1000.0 * _UNITS[match[2]] / int(match[1])


def encode_value(value: Any) -> bytes:
    """Returns a value as JSON, pydantic models included;
    raises `TypeError` for what has no JSON."""
    return _encoder.encode(value)


def convert_value(value: Any, kind: Any) -> Any:
    """Returns a value of decoded JSON as an annotated type, which may be or hold pydantic models.

    A type that no JSON fits, such as a union of two models, leaves the value as it is. Raises
    `msgspec.ValidationError` for a value that does not fit the type.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode_model)
    except (TypeError, NotImplementedError):
        return value


def _declare(function: Callable[..., Any], options: dict[str, Any]) -> JobFunction[..., Any]:
    label = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    try:
        declared = DeclaredJob(
            arguments=_arguments_of(function), function=function, **_normalised(function, options)
        )
        _check(declared)
    except (ValueError, TypeError) as error:
        raise BadDeclaration(f"{label} cannot be a job: {error}") from None
    decorated = JobFunction(function, declared)
    _declared.append(decorated)
    return decorated


def _normalised(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    values = dict(options)
    if not values.get("name"):
        values["name"] = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    retry_on = values.get("retry_on", DEFAULT_RETRY_ON)
    values["retry_on"] = (retry_on,) if isinstance(retry_on, type) else tuple(retry_on)
    backoff = values.get("backoff", ())
    pauses = (backoff,) if isinstance(backoff, int | float) else backoff
    values["backoff"] = tuple(float(pause) for pause in pauses)
    handler = values.get("on_failed", "")
    values["on_failed"] = handler.type.name if isinstance(handler, JobFunction) else handler
    secrets = values.get("secrets", ())
    values["secrets"] = (secrets,) if isinstance(secrets, str) else tuple(secrets)
    return values


def _check(declared: DeclaredJob) -> None:
    """Raises `ValueError` with what to change."""
    for field, text, pattern, form in (
        ("name", declared.name, _NAME, "1 to 100 letters, digits, '_', '.', '-'"),
        ("queue", declared.queue, _QUEUE, "1 to 64 of a-z, 0-9, '_', '.', '-'"),
        ("group", declared.group or "-", _TEXT, "at most 128 printable characters"),
        (
            "on_failed",
            declared.on_failed or "-",
            re.compile(r"-|" + _NAME.pattern),
            "the name of a type",
        ),
    ):
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise ValueError(f"{field} is {form}")
    for secret in declared.secrets:
        if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
            raise ValueError("secrets are names of letters, digits and '_'")
    for field, value, lowest, highest in (
        ("version", declared.version, 1, 1_000_000),
        ("priority", declared.priority, 0, MAX_PRIORITY),
        ("memory", declared.memory, 16 * 1024 * 1024, 1 << 50),
        (
            "max_attempts",
            1 if declared.max_attempts is None else declared.max_attempts,
            1,
            MAX_ATTEMPTS,
        ),
        ("max_running", declared.max_running, 0, 1_000_000),
        ("max_running_per_node", declared.max_running_per_node, 0, 1_000_000),
        ("concurrency", declared.concurrency, 1, MAX_CONCURRENCY),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise ValueError(f"{field} is a whole number from {lowest} to {highest}")
    timeout = 1.0 if declared.timeout is None else declared.timeout
    for field, seconds, longest in (
        ("timeout", timeout, MAX_TIMEOUT_S),
        ("unique_for", declared.unique_for or 1.0, MAX_UNIQUE_FOR_S),
        *(("backoff", pause or 1.0, MAX_BACKOFF_S) for pause in declared.backoff),
    ):
        if not 0 < seconds <= longest:
            raise ValueError(f"{field} is more than 0 and at most {longest:.0f} seconds")
    if declared.rate:
        parse_rate(declared.rate)
    if not all(
        isinstance(kind, type) and issubclass(kind, BaseException) for kind in declared.retry_on
    ):
        raise ValueError("retry_on names classes of exceptions")
    if declared.concurrency > 1 and not declared.is_async:
        raise ValueError("concurrency needs an async function")
    fields = set(declared.arguments.__struct_fields__)
    for placeholder in re.findall(r"\{([^{}]*)\}", declared.group):
        if placeholder not in fields:
            raise ValueError(f"group names {{{placeholder}}}, which is no argument")


def _arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Returns a struct with a field for each parameter; raises `ValueError`."""
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError("only a plain or async function can be")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"its annotations cannot be read: {error}") from None
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"argument {parameter.name!r} needs a name of its own: no *args, **kwargs or '/'"
            )
        if parameter.name not in hints:
            raise ValueError(f"argument {parameter.name!r} has no annotation")
        field = (parameter.name, hints[parameter.name])
        fields.append(
            field if parameter.default is parameter.empty else (*field, _default(parameter))
        )
    struct = msgspec.defstruct(
        function.__name__,
        fields,
        kw_only=True,
        forbid_unknown_fields=True,
        module=function.__module__,
    )
    _decoder(struct)  # raises for an annotation that no JSON fits
    return struct


@functools.lru_cache(maxsize=4096)
def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


class _Parameters(NamedTuple):
    """A function's parameters by name, in their order."""

    signature: inspect.Signature
    names: tuple[str, ...]
    positional: tuple[str, ...]
    required: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _parameters_of(function: Callable[..., Any]) -> _Parameters:
    """Returns the parameters: read once, since it takes 7 µs, as much as an enqueue."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    return _Parameters(
        signature,
        tuple(each.name for each in parameters),
        tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD),
        frozenset(each.name for each in parameters if each.default is each.empty),
    )


def _bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns a call's arguments by name, in the order of the parameters; raises `TypeError`.

    It does what `Signature.bind` does, which takes 5 µs, for calls that fit.
    """
    parameters = _parameters_of(function)
    bound = dict(zip(parameters.positional, args, strict=False))
    fits = len(bound) == len(args) and bound.keys().isdisjoint(kwargs)
    bound |= kwargs
    if not (fits and parameters.required <= bound.keys() <= set(parameters.names)):
        return parameters.signature.bind(*args, **kwargs).arguments  # raises, and says why
    return {name: bound[name] for name in parameters.names if name in bound} if kwargs else bound


def _default(parameter: inspect.Parameter) -> Any:
    value = parameter.default
    if isinstance(value, list | dict | set):
        return msgspec.field(default_factory=lambda: type(value)(value))
    return msgspec.field(default_factory=lambda: value)


@functools.lru_cache(maxsize=4096)
def _decoder(struct: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(struct, dec_hook=_decode_model)


def _decode_model(kind: type, value: Any) -> Any:
    """Makes a pydantic model of decoded JSON.
    Its errors are `ValueError`s, which msgspec reports."""
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise NotImplementedError(f"{kind.__name__} is no type of JSON")
    return validate(value)


def _encode_model(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise NotImplementedError(f"{type(value).__name__} has no JSON")
    return dump(mode="json")


_encoder = msgspec.json.Encoder(enc_hook=_encode_model)
