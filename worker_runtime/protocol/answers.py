"""Reads and signs answers as Valkey stores them: `author|MAC|payload`, with an `Answer` as payload.

The author is `worker:<epoch>:<worker id>`, with a MAC under that assignment's key, or `service`
(the API or an orchestrator), with a MAC under the user's service key, which no worker has. Only a
service may say that it has withdrawn a request: a worker that says so of an order that it has
executed would hide it.
"""

from dataclasses import dataclass

from worker_runtime.protocol.authentication import MessageKeys, sign, verify
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Answer, decode, encode

SERVICE = "service"
_WORKER = "worker"


def worker_author(epoch: int, worker_id: str) -> str:
    return f"{_WORKER}:{epoch}:{worker_id}"


def sign_answer(keys: MessageKeys, user_id: str, author: str, answer: Answer) -> bytes:
    """Returns the answer to a request of this user, ready to be stored and published."""
    payload = encode(answer)
    mac = sign(keys, b"answer/1", user_id.encode(), author.encode(), payload)
    return f"{author}|{mac}|".encode() + payload


@dataclass(frozen=True, slots=True)
class SignedAnswer:
    """An answer that was read, and is not yet known to be its author's."""

    author: str
    mac: str
    payload: bytes
    answer: Answer

    @property
    def epoch(self) -> int | None:
        """Returns the epoch of the worker that wrote it; None if a service did."""
        return None if self.author == SERVICE else int(self.author.split(":", 2)[1])

    def is_authentic(self, keys: MessageKeys, user_id: str) -> bool:
        """Returns True if a holder of `keys` wrote it: those of the author, for this user."""
        return verify(
            keys, self.mac, b"answer/1", user_id.encode(), self.author.encode(), self.payload
        )

    def is_about(self, request_id: str, order_id: str) -> bool:
        """Returns True if it answers this request and says nothing of another order. `order_id` is
        '' for a request that concerns no order."""
        outcome = self.answer.outcome
        return self.answer.request_id == request_id and (
            outcome is None or outcome.order_id == order_id
        )


def read_answer(data: bytes) -> SignedAnswer:
    """Raises `MalformedMessage`."""
    parts = data.split(b"|", 2)
    if len(parts) != 3 or not (parts[0] + parts[1]).isascii():
        raise MalformedMessage("an answer is not `author|MAC|payload`")
    author, mac = parts[0].decode("ascii"), parts[1].decode("ascii")
    kind, _, rest = author.partition(":")
    epoch = rest.partition(":")[0]
    # 18 digits fit; `int` would raise ValueError for thousands of them.
    if author != SERVICE and (kind != _WORKER or not epoch.isdigit() or len(epoch) > 18):
        raise MalformedMessage("an answer has no author")
    return SignedAnswer(author, mac, parts[2], decode(parts[2], Answer))
