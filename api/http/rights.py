"""Defines what each role may do, and which scope of an API key each route needs: one table of all
routes, which the authentication of every request reads.

A user's key acts for its own user only, wherever a route names one. An operator keeps the system
running: pools, rollouts of allowed images, switches, attention, workers; it stores no credentials,
makes no keys, and trades for nobody, but it cancels orders and closes positions. An administrator
may do everything.

A key has scopes, and may call the routes of its role whose scope it has. A key that a release
before scopes has made has none listed and may do all that its role may do.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


class Scope(StrEnum):
    """A part of what a role may do."""

    #: Look at everything that the role may see, but for what has a scope of its own.
    READ = "read"
    #: Place, change and cancel orders, close positions; users: set their switch, start and stop
    #: their worker.
    TRADE = "trade"
    #: Store and remove a broker's credentials; users: have a login tried again.
    CREDENTIALS = "credentials"
    #: Make, change and revoke webhooks; what lets a webhook place orders needs `trade`, too.
    #: Operators: name symbols in signals.
    WEBHOOKS = "webhooks"
    #: Enqueue, look at and cancel jobs; operators: job types, their limits, weights of queues.
    JOBS = "jobs"
    #: List, rotate and revoke API keys; administrators: make them.
    KEYS = "keys"
    #: Operators: workers, pools, rollouts, maintenance.
    FLEET = "fleet"
    #: Operators: orders of unknown outcome, differences from the broker's books, dead letters.
    ATTENTION = "attention"
    #: Operators: trading switches and limits of accounts.
    RISK = "risk"
    #: Operators: create, disable and remove users, and say where their statements go.
    USERS = "users"
    #: Administrators: the images that workers may be launched from.
    IMAGES = "images"
    #: Operators: read the audit trail.
    AUDIT = "audit"
    #: Operators: read the metrics, as Prometheus does.
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Right:
    """Says who may call a route."""

    roles: frozenset[Role]
    #: The scope that a key needs; None: any key of these roles may call it.
    scope: Scope | None
    #: The scope that an operator's or administrator's key needs, where it is another one.
    staff_scope: Scope | None = None
    #: A scope that a key needs besides.
    also: Scope | None = None
    #: A scope that is enough by itself.
    or_scope: Scope | None = None
    #: True if a key for the jobs of some applications may call it (`jobs_scope`). The route lets it
    #: reach these applications only (`Principal.applications_in_reach`).
    for_applications: bool = False

    def scopes_for(self, role: Role) -> tuple[Scope, ...]:
        """Return the scopes that a key of this role needs, all of them."""
        scope = self.staff_scope if self.staff_scope and role is not Role.USER else self.scope
        return tuple(needed for needed in (scope, self.also) if needed is not None)

    def missing_scope(
        self, role: Role, held: Collection[Scope] | None, applications: Collection[str] = ()
    ) -> Scope | None:
        """Return a scope that a key lacks which holds these (None: all); None: it has what it
        needs.

        `applications`: those for whose jobs the key was made.
        """
        if held is None or self.or_scope in held or (self.for_applications and applications):
            return None
        return next((scope for scope in self.scopes_for(role) if scope not in held), None)


#: The prefix of the scope of a key for one application's jobs: `jobs:shop`.
APPLICATION_PREFIX = f"{Scope.JOBS}:"
#: A column of 32 characters holds such a scope.
APPLICATION_SCOPE_PATTERN = rf"^{APPLICATION_PREFIX}[a-z][a-z0-9-]{{0,26}}$"


def jobs_scope(application: str) -> str:
    """Return the scope of a key that enqueues, looks at and cancels jobs of one application."""
    return f"{APPLICATION_PREFIX}{application}"


def known_applications(words: Collection[str] | None) -> frozenset[str]:
    """Return the applications that a key's row lists by scopes such as `jobs:shop`."""
    return frozenset(
        word.removeprefix(APPLICATION_PREFIX)
        for word in words or ()
        if word.startswith(APPLICATION_PREFIX)
    )


def known_scopes(words: Collection[str] | None) -> frozenset[Scope] | None:
    """Return the scopes that a key's row lists; a word of a later release grants nothing. None
    stays None."""
    return None if words is None else frozenset(scope for scope in Scope if scope in words)


ALL = frozenset(Role)
STAFF = frozenset({Role.OPERATOR, Role.ADMIN})
#: The roles that may spend a user's money, or let others do so.
OWNERS = frozenset({Role.USER, Role.ADMIN})
ADMINS = frozenset({Role.ADMIN})

_USER = "/users/{user_id}"
_ACCOUNT = f"{_USER}/accounts/{{account_id}}"

#: Method and path below /v1. A route that is missing here is refused to everybody.
RIGHTS: Mapping[str, Right] = {
    # Orders and positions
    f"POST {_USER}/orders": Right(OWNERS, Scope.TRADE),
    f"GET {_USER}/orders": Right(ALL, Scope.READ),
    f"GET {_USER}/orders.csv": Right(ALL, Scope.READ),
    f"GET {_USER}/orders/events": Right(ALL, Scope.READ),
    "GET /orders": Right(STAFF, Scope.READ),
    "GET /orders/{order_id}": Right(ALL, Scope.READ),
    "POST /orders/{order_id}/cancel": Right(ALL, Scope.TRADE),
    "POST /orders/{order_id}/replace": Right(OWNERS, Scope.TRADE),
    f"GET {_ACCOUNT}/positions": Right(ALL, Scope.READ),
    f"GET {_ACCOUNT}/balance": Right(ALL, Scope.READ),
    f"POST {_ACCOUNT}/positions/{{symbol}}/close": Right(ALL, Scope.TRADE),
    f"POST {_ACCOUNT}/intents": Right(OWNERS, Scope.TRADE),
    # A webhook's token places orders: who makes one, or gets its token or secret, trades by it.
    f"POST {_USER}/webhooks": Right(OWNERS, Scope.WEBHOOKS, also=Scope.TRADE),
    f"GET {_USER}/webhooks": Right(ALL, Scope.READ),
    f"PATCH {_USER}/webhooks/{{webhook_id}}": Right(OWNERS, Scope.WEBHOOKS, also=Scope.TRADE),
    f"DELETE {_USER}/webhooks/{{webhook_id}}": Right(ALL, Scope.WEBHOOKS),
    f"POST {_USER}/webhooks/{{webhook_id}}/pause": Right(ALL, Scope.WEBHOOKS),
    f"POST {_USER}/webhooks/{{webhook_id}}/resume": Right(OWNERS, Scope.WEBHOOKS, also=Scope.TRADE),
    f"POST {_USER}/webhooks/{{webhook_id}}/rotate": Right(OWNERS, Scope.WEBHOOKS, also=Scope.TRADE),
    f"POST {_USER}/webhooks/{{webhook_id}}/test": Right(ALL, Scope.WEBHOOKS),
    f"GET {_USER}/webhooks/{{webhook_id}}/calls": Right(ALL, Scope.READ),
    f"GET {_USER}/webhooks/{{webhook_id}}/calls.csv": Right(ALL, Scope.READ),
    # Names of symbols in signals
    "GET /symbols": Right(ALL, Scope.READ),
    "PUT /symbols/{name}": Right(STAFF, Scope.WEBHOOKS),
    "DELETE /symbols/{name}": Right(STAFF, Scope.WEBHOOKS),
    # Instruments that brokers list
    "GET /instruments": Right(ALL, Scope.READ),
    "GET /instruments/{broker}/{code}": Right(ALL, Scope.READ),
    "GET /instruments/sources": Right(STAFF, Scope.READ),
    "PUT /instruments/sources/{broker}": Right(STAFF, Scope.FLEET),
    "DELETE /instruments/sources/{broker}": Right(STAFF, Scope.FLEET),
    "POST /instruments/sources/{broker}/load": Right(STAFF, Scope.FLEET),
    "GET /instruments/changes": Right(STAFF, Scope.READ),
    "POST /instruments/changes/{number}/approve": Right(STAFF, Scope.RISK),
    # Users, keys, credentials, images
    "POST /users": Right(ADMINS, Scope.USERS),
    "GET /users": Right(STAFF, Scope.READ),
    f"GET {_USER}": Right(ALL, Scope.READ),
    f"POST {_USER}/disable": Right(STAFF, Scope.USERS),
    f"POST {_USER}/enable": Right(ADMINS, Scope.USERS),
    f"DELETE {_USER}": Right(ADMINS, Scope.USERS),
    f"DELETE {_ACCOUNT}": Right(OWNERS, Scope.CREDENTIALS),
    # A user's key sees and ends the user's own keys. What a key may do to itself is checked in
    # `api/keys`.
    "GET /api-keys": Right(OWNERS, Scope.KEYS),
    "POST /api-keys": Right(ADMINS, Scope.KEYS),
    "GET /api-keys/self": Right(ALL, None),
    "POST /api-keys/self/rotate": Right(ALL, Scope.KEYS),
    "DELETE /api-keys/self": Right(ALL, None),
    "POST /api-keys/{key_id}/rotate": Right(OWNERS, Scope.KEYS),
    "DELETE /api-keys/{key_id}": Right(OWNERS, Scope.KEYS),
    f"PUT {_ACCOUNT}/credentials": Right(OWNERS, Scope.CREDENTIALS),
    f"POST {_ACCOUNT}/retry": Right(ALL, Scope.CREDENTIALS, Scope.FLEET),
    f"GET {_USER}/statement-addresses": Right(ALL, Scope.READ),
    # Statements show what a user owns.
    f"PUT {_USER}/statement-addresses": Right(ADMINS, Scope.USERS),
    f"GET {_ACCOUNT}/limits": Right(ALL, Scope.READ),
    f"PUT {_ACCOUNT}/limits": Right(STAFF, Scope.RISK),  # an operator: none that is wider than now
    "GET /audit": Right(STAFF, Scope.AUDIT),
    "GET /images": Right(STAFF, Scope.READ),
    "PUT /images": Right(ADMINS, Scope.IMAGES),
    "DELETE /images": Right(ADMINS, Scope.IMAGES),
    # What waits for a person
    "GET /attention": Right(STAFF, Scope.READ),
    "POST /orders/{order_id}/recheck": Right(ALL, Scope.TRADE, Scope.ATTENTION),
    "POST /orders/{order_id}/resolve": Right(STAFF, Scope.ATTENTION),
    f"GET {_USER}/reconciliations": Right(ALL, Scope.READ),
    "GET /reconciliations": Right(STAFF, Scope.READ),
    "POST /reconciliations/{number}/resolve": Right(STAFF, Scope.ATTENTION),
    "GET /certificates": Right(STAFF, Scope.READ),
    "GET /person-matches": Right(STAFF, Scope.READ),
    "POST /person-matches/{number}/resolve": Right(STAFF, Scope.ATTENTION),
    # Switches: a user's key sets the user's own one
    "PUT /switches": Right(ALL, Scope.TRADE, Scope.RISK),
    "GET /switches": Right(ALL, Scope.READ),
    # What failed for good
    "GET /dead-letters": Right(STAFF, Scope.READ),
    "GET /dead-letters/{letter_id}": Right(STAFF, Scope.READ),
    "POST /dead-letters/{letter_id}/{act}": Right(STAFF, Scope.ATTENTION),
    # Jobs
    f"POST {_USER}/jobs": Right(ALL, Scope.JOBS),
    f"GET {_USER}/jobs/{{job_id}}": Right(ALL, Scope.READ, or_scope=Scope.JOBS),
    f"GET {_USER}/jobs/{{job_id}}/file": Right(ALL, Scope.READ, or_scope=Scope.JOBS),
    f"POST {_USER}/jobs/{{job_id}}/cancel": Right(ALL, Scope.JOBS),
    # An operator: applications' types, and ping; mails and webhooks speak in our name.
    "POST /jobs": Right(STAFF, Scope.JOBS, for_applications=True),
    "POST /jobs/batch": Right(STAFF, Scope.JOBS, for_applications=True),
    "GET /jobs/{job_id}": Right(STAFF, Scope.READ, or_scope=Scope.JOBS, for_applications=True),
    "POST /jobs/{job_id}/cancel": Right(STAFF, Scope.JOBS, for_applications=True),
    "GET /job-types": Right(STAFF, Scope.READ, or_scope=Scope.JOBS, for_applications=True),
    "GET /job-types/{application}/{name}": Right(
        STAFF, Scope.READ, or_scope=Scope.JOBS, for_applications=True
    ),
    "GET /job-applications": Right(STAFF, Scope.READ, or_scope=Scope.JOBS),
    "GET /job-queues": Right(STAFF, Scope.READ),
    "PUT /job-queues/{queue}": Right(STAFF, Scope.JOBS),
    "GET /job-limits": Right(STAFF, Scope.READ),
    "PUT /job-limits/{job_type}": Right(STAFF, Scope.JOBS),
    "PUT /job-limits/{application}/{name}": Right(STAFF, Scope.JOBS),
    # Workers, pools and the fleet
    f"GET {_USER}/worker": Right(ALL, Scope.READ),
    f"POST {_USER}/worker/start": Right(ALL, Scope.TRADE, Scope.FLEET),
    f"POST {_USER}/worker/stop": Right(ALL, Scope.TRADE, Scope.FLEET),
    f"POST {_USER}/worker/resume": Right(STAFF, Scope.FLEET),
    f"POST {_USER}/worker/reload-credentials": Right(ALL, Scope.CREDENTIALS, Scope.FLEET),
    f"GET {_USER}/worker/timeline": Right(ALL, Scope.READ),
    f"GET {_USER}/worker/events": Right(ALL, Scope.READ),
    "GET /workers": Right(STAFF, Scope.READ),
    "GET /fleet": Right(STAFF, Scope.READ),
    "GET /fleet/maintenance": Right(STAFF, Scope.READ),
    "POST /fleet/maintenance": Right(STAFF, Scope.FLEET),
    "GET /fleet/primary": Right(STAFF, Scope.READ),
    "GET /fleet/servers": Right(STAFF, Scope.READ),
    "GET /reports/daily": Right(STAFF, Scope.READ),
    f"GET {_USER}/statistics": Right(ALL, Scope.READ),
    "GET /pools/{pool}": Right(STAFF, Scope.READ),
    "PUT /pools/{pool}": Right(STAFF, Scope.FLEET),
    "POST /pools/{pool}/pause": Right(STAFF, Scope.FLEET),
    "POST /pools/{pool}/drain": Right(STAFF, Scope.FLEET),
    "POST /pools/{pool}/resume": Right(STAFF, Scope.FLEET),
    "GET /pools/{pool}/rollout": Right(STAFF, Scope.READ),
    "POST /pools/{pool}/rollout": Right(STAFF, Scope.FLEET),  # to allowed images
    "POST /pools/{pool}/rollout/abort": Right(STAFF, Scope.FLEET),
    "GET /metrics": Right(STAFF, Scope.METRICS),
}


def _scopes_of(role: Role) -> frozenset[Scope]:
    rights = [right for right in RIGHTS.values() if role in right.roles]
    return frozenset(scope for right in rights for scope in right.scopes_for(role))


#: Role → the scopes that its routes need: those that its keys may have.
SCOPES_OF: Mapping[Role, frozenset[Scope]] = {role: _scopes_of(role) for role in Role}

#: Routes that have limits of their own for a user's key, or write nothing into the audit trail.
UNCOUNTED = frozenset(
    {
        f"POST {_USER}/orders",
        "POST /orders/{order_id}/cancel",
        "POST /orders/{order_id}/replace",
        f"POST {_ACCOUNT}/positions/{{symbol}}/close",
        f"POST {_ACCOUNT}/intents",
        f"POST {_USER}/webhooks/{{webhook_id}}/test",
    }
)
#: Routes that only end or reduce something, or may: the daily quota leaves more room for them.
ENDING = frozenset(
    {
        "PUT /switches",
        f"DELETE {_ACCOUNT}",
        f"DELETE {_USER}/webhooks/{{webhook_id}}",
        f"POST {_USER}/webhooks/{{webhook_id}}/pause",
        "DELETE /api-keys/self",
        "DELETE /api-keys/{key_id}",
        f"POST {_USER}/jobs/{{job_id}}/cancel",
        f"POST {_USER}/worker/stop",
        "POST /orders/{order_id}/recheck",
    }
)


def is_counted(route: str) -> bool:
    """Return True for what counts towards a user's daily quota: changes that the audit trail
    notes."""
    return not route.startswith("GET ") and route not in UNCOUNTED
