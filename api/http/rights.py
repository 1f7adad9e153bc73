"""What each role may do: one table of all routes, which the authentication of every request reads.

A user's key acts for its own user only, wherever a route names one. An operator keeps the system running:
pools, rollouts of allowed images, switches, attention, workers; it stores no credentials, makes no keys, and
trades for nobody, but it cancels orders and closes positions. An administrator may do everything.
"""

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"


ALL = frozenset(Role)
STAFF = frozenset({Role.OPERATOR, Role.ADMIN})
#: What spends a user's money, or lets others do so.
OWNERS = frozenset({Role.USER, Role.ADMIN})
ADMINS = frozenset({Role.ADMIN})

_USER = "/users/{user_id}"
_ACCOUNT = f"{_USER}/accounts/{{account_id}}"

#: Method and path below /v1 → roles. A route that is missing here is refused to everybody.
RIGHTS: Mapping[str, frozenset[Role]] = {
    # Orders and positions
    f"POST {_USER}/orders": OWNERS,
    f"GET {_USER}/orders": ALL,
    f"GET {_USER}/orders.csv": ALL,
    f"GET {_USER}/orders/events": ALL,
    "GET /orders": STAFF,
    "GET /orders/{order_id}": ALL,
    "POST /orders/{order_id}/cancel": ALL,
    "POST /orders/{order_id}/replace": OWNERS,
    f"GET {_ACCOUNT}/positions": ALL,
    f"GET {_ACCOUNT}/balance": ALL,
    f"POST {_ACCOUNT}/positions/{{symbol}}/close": ALL,
    f"POST {_ACCOUNT}/intents": OWNERS,
    # A webhook's token places orders.
    f"POST {_USER}/webhooks": OWNERS,
    f"GET {_USER}/webhooks": ALL,
    f"PATCH {_USER}/webhooks/{{webhook_id}}": OWNERS,
    f"DELETE {_USER}/webhooks/{{webhook_id}}": ALL,
    f"POST {_USER}/webhooks/{{webhook_id}}/pause": ALL,
    f"POST {_USER}/webhooks/{{webhook_id}}/resume": OWNERS,
    f"POST {_USER}/webhooks/{{webhook_id}}/rotate": OWNERS,
    f"POST {_USER}/webhooks/{{webhook_id}}/test": ALL,
    f"GET {_USER}/webhooks/{{webhook_id}}/calls": ALL,
    f"GET {_USER}/webhooks/{{webhook_id}}/calls.csv": ALL,
    # Names of symbols in signals
    "GET /symbols": ALL,
    "PUT /symbols/{name}": STAFF,
    "DELETE /symbols/{name}": STAFF,
    # Users, keys, credentials, images
    "POST /users": ADMINS,
    "GET /users": STAFF,
    f"GET {_USER}": ALL,
    f"POST {_USER}/disable": STAFF,
    f"POST {_USER}/enable": ADMINS,
    f"DELETE {_USER}": ADMINS,
    f"DELETE {_ACCOUNT}": OWNERS,
    "GET /api-keys": ADMINS,
    "POST /api-keys": ADMINS,
    "POST /api-keys/{key_id}/rotate": ADMINS,
    "DELETE /api-keys/{key_id}": ADMINS,
    f"PUT {_ACCOUNT}/credentials": OWNERS,
    f"POST {_ACCOUNT}/retry": ALL,
    f"GET {_USER}/statement-addresses": ALL,
    f"PUT {_USER}/statement-addresses": ADMINS,  # statements show what a user owns
    f"GET {_ACCOUNT}/limits": ALL,
    f"PUT {_ACCOUNT}/limits": STAFF,  # an operator: none that is wider than now
    "GET /audit": STAFF,
    "GET /images": STAFF,
    "PUT /images": ADMINS,
    "DELETE /images": ADMINS,
    # What waits for a person
    "GET /attention": STAFF,
    "POST /orders/{order_id}/recheck": ALL,
    "POST /orders/{order_id}/resolve": STAFF,
    f"GET {_USER}/reconciliations": ALL,
    "GET /reconciliations": STAFF,
    "POST /reconciliations/{number}/resolve": STAFF,
    "GET /person-matches": STAFF,
    "POST /person-matches/{number}/resolve": STAFF,
    # Switches: a user's key sets the user's own one
    "PUT /switches": ALL,
    "GET /switches": ALL,
    # What failed for good
    "GET /dead-letters": STAFF,
    "GET /dead-letters/{letter_id}": STAFF,
    "POST /dead-letters/{letter_id}/{act}": STAFF,
    # Jobs
    f"POST {_USER}/jobs": ALL,
    f"GET {_USER}/jobs/{{job_id}}": ALL,
    f"GET {_USER}/jobs/{{job_id}}/file": ALL,
    f"POST {_USER}/jobs/{{job_id}}/cancel": ALL,
    "POST /jobs": STAFF,  # an operator: ping only; mails and webhooks speak in our name
    "GET /jobs/{job_id}": STAFF,
    "POST /jobs/{job_id}/cancel": STAFF,
    "GET /job-limits": STAFF,
    "PUT /job-limits/{job_type}": STAFF,
    # Workers, pools and the fleet
    f"GET {_USER}/worker": ALL,
    f"POST {_USER}/worker/start": ALL,
    f"POST {_USER}/worker/stop": ALL,
    f"POST {_USER}/worker/resume": STAFF,
    f"POST {_USER}/worker/reload-credentials": ALL,
    f"GET {_USER}/worker/timeline": ALL,
    f"GET {_USER}/worker/events": ALL,
    "GET /workers": STAFF,
    "GET /fleet": STAFF,
    "GET /fleet/maintenance": STAFF,
    "POST /fleet/maintenance": STAFF,
    "GET /fleet/primary": STAFF,
    "GET /fleet/servers": STAFF,
    "GET /reports/daily": STAFF,
    f"GET {_USER}/statistics": ALL,
    "GET /pools/{pool}": STAFF,
    "PUT /pools/{pool}": STAFF,
    "POST /pools/{pool}/pause": STAFF,
    "POST /pools/{pool}/drain": STAFF,
    "POST /pools/{pool}/resume": STAFF,
    "GET /pools/{pool}/rollout": STAFF,
    "POST /pools/{pool}/rollout": STAFF,  # to allowed images
    "POST /pools/{pool}/rollout/abort": STAFF,
    "GET /metrics": STAFF,
}
