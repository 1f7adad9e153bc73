"""All Valkey keys of the job queue.

The keys of one set of queues carry one hash tag, so that a script may touch them together on a
cluster: `jobs` for the fleet's shared queues, `user:<id>` for a user's own jobs, `app:<name>` for
an application's. The scripts build the same names from the key of the settings (`queue_lib.lua`).

| key | type | lives | holds |
|---|---|---|---|
| jobs:{tag}:meta | hash | for ever | settings (weight, boost, limits, halts), sequence, fence, passes |
| jobs:{tag}:job:<id> | hash | until it ends | one job; a failed one stays 14 days, of a user the newest 50 |
| jobs:{tag}:ready | zset | while there is work | queue → its turns so far, divided by its weight |
| jobs:{tag}:subqueues:<queue> | zset | while there is work | type of job → score of its first job |
| jobs:{tag}:subqueue:<queue>:<name> | zset | while there is work | job → score |
| jobs:{tag}:delayed | zset | until due | job → Unix ms |
| jobs:{tag}:parked | zset | while there is work | queue and receiver with parked jobs → Unix ms of the next look |
| jobs:{tag}:parked:<queue> <receiver> | zset | while there is work | job that has to wait → score |
| jobs:{tag}:group:<group> | zset | until it ends | jobs of an ordered group; the first one may run |
| jobs:{tag}:unique:<key> | string | until it ends | the job that has this key |
| jobs:{tag}:rate:<name>:<key> | string | while it matters | Unix ms at which the next job may run |
| jobs:{tag}:totals | hash | for ever | what its runners have counted; of a user until collected |
| jobs:{tag}:users | hash | for ever | collected counts of all users' own jobs (tag of the fleet) |
| jobs:{tag}:running:<name> | hash | while one runs | node → jobs of this type that run there |
| jobs:{tag}:beats | hash | for ever | runner → beat; a runner is dead if it does not change |
| jobs:{tag}:runner:<runner> | hash | 420 s | name, node, queues, state, jobs, born_at, seen_at |
| jobs:{tag}:held:<runner> | set | while it runs | the runner's jobs in flight |
| jobs:{tag}:mailbox:<runner> | list | 1 h | messages to one runner: cancel, check |
| jobs:{tag}:doorbell | list | until rung | wakes an idle runner of all queues |
| jobs:{tag}:doorbell:<queue> | list | until rung | wakes an idle runner of this queue |
| jobs:{tag}:manifests | hash | of live runners, and the newest 50 | digest → a signed list of job types |
| jobs:{tag}:packages | hash | as long as its manifest | digest → the package of the first type |
| jobs:{tag}:packages:<digest> | hash | as long as its manifest | type → the package that declares it |
| jobs:{tag}:announced | zset | as long as its manifest | digest → Unix µs of its last announcement |
| jobs:{tag}:types:<digest> | set | as long as its manifest | the names of its job types |
| jobs:{tag}:handlers | zset | until its handler is enqueued | failed job with a handler → Unix ms |
| jobs:{tag}:failed | zset | 14 days | job → Unix ms of its failure |
| jobs:{tag}:result:<id> | string | 500 s, of the fleet a day | the result |
| jobs:{tag}:recent | string | 500 s | number of jobs that the user has asked for |
| jobs:{tag}:done:<id> | channel |  | the result, once it is stored |
| jobs:{tag}:events | stream | 10,000 | what became of each run; of a user 100, for a day |
"""  # noqa: E501 - a row of the table is one line

from collections.abc import Callable

#: The tag of the fleet's queues.
FLEET_TAG = "jobs"
#: The prefix of the tag of an application.
_APPLICATION_PREFIX = "app:"


def user_tag(user_id: str) -> str:
    """Returns the tag of a user's own jobs. No user id makes it the fleet's."""
    return f"user:{user_id}"


def application_tag(name: str) -> str:
    """Return the tag of an application's jobs.
    It is no user's, since no id of a user has a colon."""
    return f"{_APPLICATION_PREFIX}{name}"


def application_of_tag(tag: str) -> str:
    """Return the application whose tag this is; an empty text for another tag."""
    return tag.removeprefix(_APPLICATION_PREFIX) if tag.startswith(_APPLICATION_PREFIX) else ""


def tag_of(owner: str) -> str:
    """Return the tag of an owner's jobs: of a user's id,
    or an application's tag; without one the fleet's."""
    if owner.startswith(_APPLICATION_PREFIX):
        return owner
    return user_tag(owner) if owner else FLEET_TAG


def _key(tag: str, *parts: str) -> str:
    return ":".join((f"jobs:{{{tag}}}", *parts))


def _one(kind: str) -> Callable[[str], str]:
    """Builds the only key of this kind of a tag."""
    return lambda tag: _key(tag, kind)


def _many(kind: str) -> Callable[[str, str], str]:
    """Builds a key of this kind from the tag and a name or id."""
    return lambda tag, name: _key(tag, kind, name)


meta = _one("meta")
job = _many("job")
ready = _one("ready")
subqueues = _many("subqueues")
delayed = _one("delayed")
group = _many("group")
unique = _many("unique")
running = _many("running")
totals = _one("totals")
beats = _one("beats")
runner = _many("runner")
held = _many("held")
mailbox = _many("mailbox")
manifests = _one("manifests")
announced = _one("announced")
announced_types = _many("types")
handlers = _one("handlers")
failed = _one("failed")
result = _many("result")
recent_requests = _one("recent")
done = _many("done")
events = _one("events")


def subqueue(tag: str, queue: str, name: str) -> str:
    return _key(tag, "subqueue", queue, name)


def doorbell(tag: str, queue: str = "") -> str:
    """Returns the doorbell of one queue, or of the runners that serve all queues."""
    return _key(tag, "doorbell", queue) if queue else _key(tag, "doorbell")


def every_key(tag: str) -> str:
    """Returns a pattern of all keys of this tag."""
    return _key(tag, "*")


def user_totals() -> str:
    """Returns the key of the totals of all users' own jobs: among the fleet's keys, so that one
    read finds them."""
    return _key(FLEET_TAG, "users")
