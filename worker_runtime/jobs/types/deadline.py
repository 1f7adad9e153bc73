"""Sets one deadline for all that a delivery does with a stranger's server, whatever it waits for.

A limit for each step does not bound a server that sends
a byte now and then. So an alarm interrupts the step.
"""

import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

#: Addresses of one name that are tried.
MAX_ADDRESSES = 8
#: Seconds after which the alarm comes again, in case a library has swallowed it.
_ALARM_REPEAT_INTERVAL_S = 1.0
#: Seconds by which an alarm may be early: the kernel counts in microseconds.
_MAX_EARLY_ALARM_S = 0.001

Address = tuple[str, int]

#: When the open blocks end, the outermost first; instants on `time.monotonic`.
_ends: list[float] = []


class TimeIsUp(Exception):
    """The deadline has passed.

    It is no OSError: a library that tries a server's
    addresses takes one as a reason to try the next.
    """


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in the block once `seconds` have passed;
    inside another block no later than there.

    For a main thread: it uses SIGALRM.
    """
    outer = len(_ends)
    _ends.append(min([time.monotonic() + seconds, *_ends]))
    signal.signal(signal.SIGALRM, _raise)
    _set_alarm()
    try:
        yield
    finally:
        while True:
            try:
                del _ends[outer:]
                _set_alarm()
                break
            except TimeIsUp:
                # The alarm came just now; an end that stayed would stop all later blocks.
                continue


def time_left() -> float:
    """Returns the seconds until the innermost block ends. Raises `TimeIsUp`."""
    remaining = _ends[-1] - time.monotonic()
    if remaining <= 0:
        raise TimeIsUp
    return remaining


def _set_alarm() -> None:
    remaining = max(0.001, _ends[-1] - time.monotonic()) if _ends else 0.0
    signal.setitimer(signal.ITIMER_REAL, remaining, _ALARM_REPEAT_INTERVAL_S if _ends else 0.0)


def _raise(_number: int, _frame: object) -> None:
    # Otherwise the block of this alarm has just ended.
    if _ends and time.monotonic() >= _ends[-1] - _MAX_EARLY_ALARM_S:
        raise TimeIsUp


def resolve(host: str, port: int) -> list[Address]:
    """Returns the addresses of a name in the order in which they are to be tried. Call it within
    `deadline`.

    In a thread, because the system's resolver hears no alarm.
    Raises `OSError`, `UnicodeError`, `TimeIsUp`.
    """
    answer: SimpleQueue[list[Address] | BaseException] = SimpleQueue()

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.put([(str(target[0]), int(target[1])) for *_, target in addresses])
        except (OSError, UnicodeError) as error:
            answer.put(error)

    threading.Thread(target=look_up, name="resolver", daemon=True).start()
    addresses = answer.get()
    if isinstance(addresses, BaseException):
        raise addresses
    return list(dict.fromkeys(addresses))[:MAX_ADDRESSES]


def connect(addresses: Sequence[Address]) -> socket.socket:
    """Connects to the first address that answers; each gets its share of the time left. Call it
    within `deadline`. Raises `OSError`, `TimeIsUp`."""
    failure = OSError("the name has no address")
    for number, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        link = socket.socket(family, socket.SOCK_STREAM)
        try:
            link.settimeout(time_left() / (len(addresses) - number))
            link.connect(address)
            link.settimeout(None)  # the deadline is enough
        except OSError as error:
            link.close()
            failure = error
        except BaseException:
            link.close()
            raise
        else:
            return link
    raise failure
