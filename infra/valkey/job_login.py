"""The login of a fleet of job runners at Valkey: its name follows from the tag of its jobs, its
password from their message keys, which the fleet has anyway. Orchestrators make the user
(`job_users.py`)."""

from collections.abc import Sequence
from hashlib import blake2b
from urllib.parse import quote, urlsplit

from worker_runtime.protocol.authentication import MessageKey

#: The prefix of the names of fleets' users.
FLEET_PREFIX = "fleet-"


def user_of_jobs(tag: str) -> str:
    """Return the name of the Valkey user of this tag's fleets."""
    return f"{FLEET_PREFIX}{tag}"


def passwords_of_jobs(message_keys: Sequence[MessageKey]) -> list[str]:
    """Return a password for each version of the message keys of a tag, newest first."""
    return [
        blake2b(key.key, person=b"valkey jobs", digest_size=32, key=b"berth job fleet").hexdigest()
        for key in message_keys
    ]


def job_fleet_url(url: str, tag: str, message_keys: Sequence[MessageKey]) -> str:
    """Return `url` with the login of this tag's fleets in place of the one that it may have."""
    parts = urlsplit(without_login(url))
    login = f"{quote(user_of_jobs(tag), safe='')}:{passwords_of_jobs(message_keys)[0]}"
    return parts._replace(netloc=f"{login}@{parts.netloc}").geturl()


def without_login(url: str) -> str:
    """Return `url` without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
