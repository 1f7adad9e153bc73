"""Every Valkey key of Berth. Nothing else builds one.

The braces are Valkey Cluster's hash tag: all keys of one user (`{user}`) and of one pool (`{pool}`)
are in one slot, so that one script may use them together.

| key | type | lives | holds |
|---|---|---|---|
| trading:user:{user}:requests | list | until popped | framed requests; LPUSH, popped at the right |
| trading:user:{user}:processing | list | until answered | popped by a worker, not yet answered |
| trading:user:{user}:doorbell | list | until rung | one token when there is something to pop |
| trading:user:{user}:seen:<request> | string | deadline + 1 h | marks a request id as enqueued once |
| trading:user:{user}:client:<id> | string | 1 d | the order enqueued under a client order id, its tag |
| trading:response:{user}:<request> | string | 60 s | the answer, signed by its author |
| worker:active:{user} | string | 30 s | the mark: `epoch:worker` |
| worker:metadata:{user} | hash | 30 s | task, worker, epoch, version, state, activity… |
| worker:owner:{user} | hash | for ever | epoch, worker, generation; the orchestrator writes it |
| worker:pop:{user} | hash | 1 h | last pop of the session: number and item |
| trading:switch:{user} | hash | for ever | `*version`, `*mac`; `*` (all), accounts: open, reducing, halted |
| trading:journal:{user}:<order> | string | 2 d | set before a submission: it may have been made |
| broker:budget:{owner}:<what> | zset | its window | calls of a user as one person, or by one address |
| broker:budget:{owner}:since | hash | 40 d | since when these calls are counted; `quiet_until`: end of a pause |
| broker:budget:{owner}:connections | zset | a lease | broker connections of a person → end of the lease |
| broker:budget:{owner}:holders | hash | a lease | broker connections of a person → worker and session |
| berth:limit:{requests}:<limit> | string | its window | until when past requests of a key… are paid for (µs) |
| worker:control:{user}:messages | list | until popped | control messages; they overtake requests |
| pool:{pool}:ready | zset | for ever | worker → ready since (ms); the free ones |
| pool:{pool}:worker:<worker> | hash | 30 s | public key, proof, task, version, reserved, state, claim |
| pool:{pool}:claim:<claim> | string | 1 h | worker that this claim got |
| pool:{pool}:canary | hash | 1 h | a rollout's canary: its version, the former one, users served |
| pool:{pool}:faults | set | 1 h | users in a row whom a worker of that version failed |
| pool:{pool}:line | zset | 30 s | users who wait for a worker → since when (ms) |
| pool:{pool}:asked | zset | 30 s | the same users → when they asked last (ms) |
| pool:{pool}:inbox:<worker> | list | 1 h | messages for a worker without a user |
| pool:{pool}:reply:<worker>:<claim> | list | 1 h | the worker's answers to a claim or reload |
| pool:{pool}:born:<claim> | list | 1 h | the worker launched for this claim, once ready |
| worker:events | stream | trimmed | events of workers, as the orchestrator takes them from their lists |
| {worker:events}:changes | stream | trimmed | those of them that tell of a worker's state |
| {worker:events}:of:<worker> | list | until taken | events of one worker, each with its MAC in front |
| {worker:events}:bell | list | until taken | workers with events; `pool worker`: a worker that wants to join |
| berth:generation | string | for ever | random; another one means that data was lost |
| berth:since | hash | for ever | `server`: run id; `at_ms`: known since, 0: the first; `noted_ms`: noted at |
| berth:secret:<version> | string | 1 h | fingerprint of the message secret, by the first host |
| berth:cut-off:<worker> | string | 1 h | why the worker was cut off: it took too much of Valkey |
| berth:cut-off-logins:<tag> | set | for ever | SHA-256 of refused passwords of job runners |
| berth:exits | string | for ever | position behind the last handled end of a worker |
| berth:errors | stream | trimmed | errors of all processes, on their way to operators |
| berth:alerts | string | for ever | what operators were told, and what they are told next |
| berth:probe | string | 60 s | written by `/v1/readyz` and `berth doctor` to see that Valkey takes writes |
| berth:alerts:turn | string | 10 s | the API process that looked for alerts last |
| berth:hosts | hash | 60 s | what each API process measures of its host, for alerts |
| berth:launches | string | a burst | when the next launch is due by the platform's rate |
| berth:answers:<process>:<user> | channel |  | a user's answers for one API process |
| berth:answers:{user}:<request> | channel |  | the answer for a job of the user's own |
"""  # noqa: E501 - a row of the table is one line

from collections.abc import Callable

#: Seconds a mark, its metadata and a pool worker's entry live without a renewal.
MARK_TTL_S = 30.0
#: Seconds an answer stays readable for a caller that comes back.
ANSWER_TTL_S = 60
#: Seconds a claim, its inbox and its replies are kept.
CLAIM_TTL_S = 3600
#: Seconds for which it is known that a worker was cut off; its end is reported within that time.
CUT_OFF_TTL_S = 3600

EVENTS = "worker:events"
CHANGES = "{worker:events}:changes"
EVENT_BELL = "{worker:events}:bell"
GENERATION = "berth:generation"
#: Since when the present server is known: its run id, and Unix ms by its own clock.
SERVER_SINCE = "berth:since"
EXITS_HANDLED = "berth:exits"
LAUNCHES = "berth:launches"
ERRORS = "berth:errors"
ALERTS = "berth:alerts"
ALERTS_TURN = "berth:alerts:turn"
HOST_REPORTS = "berth:hosts"
#: Written by who wants to know whether the server takes writes.
WRITE_PROBE = "berth:probe"


def _one(prefix: str, kind: str = "") -> Callable[[str], str]:
    """Builds the only key of this kind of a user or pool."""
    suffix = f":{kind}" if kind else ""
    return lambda owner: f"{prefix}:{{{owner}}}{suffix}"


def _many(prefix: str, kind: str = "") -> Callable[[str, str], str]:
    """Builds a key of this kind from the user or pool and an id."""
    suffix = f":{kind}:" if kind else ":"
    return lambda owner, name: f"{prefix}:{{{owner}}}{suffix}{name}"


# Of a user, and of their request, order or budget.
requests = _one("trading:user", "requests")
processing = _one("trading:user", "processing")
doorbell = _one("trading:user", "doorbell")
seen = _many("trading:user", "seen")
client_order = _many("trading:user", "client")
response = _many("trading:response")
mark = _one("worker:active")
metadata = _one("worker:metadata")
owner = _one("worker:owner")
pop = _one("worker:pop")
switch = _one("trading:switch")
journal = _many("trading:journal")
control = _one("worker:control", "messages")
#: Its first part names user and person, linked users, or a user's share of an address, by a keyed
#: hash that begins with the key's version; the second one is orders, queries…
budget = _many("broker:budget")

# Of a pool, and of its worker or claim.
pool_ready = _one("pool", "ready")
pool_worker = _many("pool", "worker")
pool_claim = _many("pool", "claim")
pool_canary = _one("pool", "canary")
pool_faults = _one("pool", "faults")
pool_wait_queue = _one("pool", "line")
pool_last_asked = _one("pool", "asked")
pool_inbox = _many("pool", "inbox")
pool_born = _many("pool", "born")


def enqueueing(user_id: str, request_id: str) -> list[str]:
    """Returns KEYS of `enqueue.lua`, but for that of a client order id."""
    return [seen(user_id, request_id), requests(user_id), doorbell(user_id), mark(user_id)]


def answering(user_id: str, request_id: str) -> list[str]:
    """Returns KEYS of `answer.lua`."""
    return [response(user_id, request_id), processing(user_id), requests(user_id), control(user_id)]


def withdrawing(user_id: str, request_id: str) -> list[str]:
    """Returns KEYS of `withdraw.lua`."""
    return [requests(user_id), response(user_id, request_id), journal(user_id, request_id)]


def pool_reply(pool: str, worker_id: str, claim_id: str) -> str:
    """Returns the key of a reply; `claim_id` may be the id of a reload."""
    return f"pool:{{{pool}}}:reply:{worker_id}:{claim_id}"


def pool_worker_prefix(pool: str) -> str:
    """Returns what `claim.lua` puts before a worker id."""
    return pool_worker(pool, "")


def events_of(worker_id: str) -> str:
    return f"{{{EVENTS}}}:of:{worker_id}"


def answers(name: str) -> str:
    return f"berth:answers:{name}"


def own_answers(user_id: str, request_id: str) -> str:
    """Returns the channel on which a user's own job hears of its answer."""
    return answers(f"{{{user_id}}}:{request_id}")


def request_limit(name: str) -> str:
    """Returns the key of a limit: all are in one slot, so that one script settles many."""
    return f"berth:limit:{{requests}}:{name}"


def cut_off(worker_id: str) -> str:
    return f"berth:cut-off:{worker_id}"


def cut_off_logins(tag: str) -> str:
    return f"berth:cut-off-logins:{tag}"


def secret(version: int) -> str:
    return f"berth:secret:{version}"
