"""Makes a Valkey user for each fleet of job runners, which reaches the keys of its jobs only
(setting `valkey_users`).

A fleet serves the jobs of one tag, from whose message keys its password is derived
(`job_login.py`). Orchestrators make the users, also again on a server that has lost them. A fleet
that starts earlier retries until it can log in.

A fleet runs the scripts that orchestrators have loaded, and brings none. A fleet that uses too much
of Valkey is cut off: its passwords are refused until an operator rotates the keys from which they
are derived.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import structlog
from redis.asyncio import Redis

from infra.valkey import client as valkey
from infra.valkey.client import reply_of, text_of
from infra.valkey.job_login import passwords_of_jobs, user_of_jobs
from infra.valkey.worker_users import COMMANDS
from infra.vault.message_secret import MessageSecrets
from worker_runtime.jobs.protocol import keys as job_keys
from worker_runtime.protocol import keys, scripts
from worker_runtime.protocol.authentication import MessageKey

#: A worker's commands, and the scripts.
JOB_COMMANDS = (*COMMANDS, "evalsha", "sismember")

log = structlog.get_logger()


def job_fleet_rights(tag: str) -> list[str]:
    """Return the rights of a fleet: all keys of its tag, and to append an error for operators."""
    return [
        *(f"+{command}" for command in JOB_COMMANDS),
        f"~{job_keys.every_key(tag)}",
        f"&{job_keys.done(tag, '*')}",
        f"(+xadd ~{keys.ERRORS})",
    ]


class JobUsers:
    """May be used by every orchestrator at once: all make the same users."""

    def __init__(self, client: Redis, message_secrets: MessageSecrets) -> None:
        self._client = client
        self._secrets = message_secrets
        #: The server and the passwords, for each tag, of the last user that this process made.
        self._made: dict[str, tuple[str, tuple[str, ...]]] = {}

    async def ensure(self, server: str, tags: Sequence[str] = (job_keys.FLEET_TAG,)) -> None:
        """Makes the users of these tags unless this process has made them on this server, with the
        passwords of today. Safe to repeat. Raises `RedisError`.

        `server`: the server's run id. The passwords of earlier versions stay as long as the server
        lives, since another host may hold versions that this one lacks.
        """
        for tag in tags:
            passwords = tuple(passwords_of_jobs(self._secrets.job_keys(tag)))
            if self._made.get(tag) == (server, passwords):
                continue
            refused = await reply_of(self._client.smembers(keys.cut_off_logins(tag)))
            digests = {text_of(digest) for digest in refused}
            accepted = [password for password in passwords if _digest(password) not in digests]
            if accepted:
                await self._define(tag, accepted)
                log.info("job_fleet_user_made", user=user_of_jobs(tag))
            else:
                log.error(
                    "job_fleet_stays_cut_off",
                    user=user_of_jobs(tag),
                    reason="rotate the keys of its jobs",
                )
            self._made[tag] = server, passwords

    async def revoke(self, tag: str, message_keys: Sequence[MessageKey]) -> None:
        """Ends logins by these keys, which an application no longer has, and the connections of its
        user. Those with another key come back by themselves. Safe to repeat."""
        name = user_of_jobs(tag)
        held = await self._held_digests(name)
        revoked = {_digest(text) for text in passwords_of_jobs(message_keys)} & held
        if revoked:
            await self._ask("ACL", "SETUSER", name, *(f"!{digest}" for digest in sorted(revoked)))
            await self._ask("CLIENT", "KILL", "USER", name)
            log.warning("job_logins_revoked", user=name, passwords=len(revoked))

    async def cut_off(self, tag: str, reason: str) -> None:
        """Ends the login of this tag's fleets and their connections, also on a later server.
        What they wrote stays, since nobody can tell it from what services wrote. Safe to
        repeat. Raises `RedisError`."""
        name = user_of_jobs(tag)
        digests = await self._held_digests(name)
        digests |= {_digest(text) for text in passwords_of_jobs(self._secrets.job_keys(tag))}
        try:
            await valkey.run_script(
                self._client, scripts.NOTE_CUT_OFF, [keys.cut_off_logins(tag)], sorted(digests)
            )
        finally:
            await self._ask("ACL", "DELUSER", name)
        log.error("job_fleet_cut_off", user=name, reason=reason)

    async def _held_digests(self, name: str) -> set[str]:
        """Return the passwords of a Valkey user, as SHA-256; none if there is no such user."""
        about = await self._ask("ACL", "GETUSER", name)
        fields = (
            about
            if isinstance(about, Mapping)
            else dict(zip(about[::2], about[1::2], strict=True) if about else ())
        )
        return {text_of(digest) for digest in fields.get(b"passwords", fields.get("passwords", ()))}

    async def delete(self, tag: str) -> None:
        """Ends the login of this tag's fleets, and their connections."""
        self._made.pop(tag, None)
        await self._ask("ACL", "DELUSER", user_of_jobs(tag))

    async def _define(self, tag: str, passwords: Sequence[str]) -> None:
        rights = ("resetkeys", "resetchannels", "clearselectors", "-@all", *job_fleet_rights(tag))
        words = [f">{password}" for password in passwords]
        await self._ask("ACL", "SETUSER", user_of_jobs(tag), "on", *words, *rights)

    async def _ask(self, *words: str) -> Any:
        return await reply_of(self._client.execute_command(*words))  # type: ignore[no-untyped-call]


def _digest(password: str) -> str:
    return sha256(password.encode()).hexdigest()
