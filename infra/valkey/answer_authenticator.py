"""Checks the answers that Valkey stores, and signs those of the API and the orchestrator.

An answer is used only if its author had the key, and if it is about this request and this order.
Any other answer is discarded: then the deadline, the sweeper and the broker's list decide.
"""

import structlog

from infra.process_metrics import REFUSED
from infra.vault.message_secret import MessageSecrets
from worker_runtime.protocol.answers import SERVICE, SignedAnswer, read_answer, sign_answer
from worker_runtime.protocol.authentication import RefusalCounter
from worker_runtime.protocol.errors import MalformedMessage
from worker_runtime.protocol.messages import Answer

log = structlog.get_logger()


class AnswerAuthenticator:
    def __init__(self, message_secrets: MessageSecrets) -> None:
        self._secrets = message_secrets
        #: Counts the answers that were discarded.
        self.refused = RefusalCounter(REFUSED.labels("answer").inc)

    def sign(self, user_id: str, answer: Answer) -> bytes:
        """Returns an answer of a service, signed."""
        return sign_answer(self._secrets.service_keys(user_id), user_id, SERVICE, answer)

    def read(
        self, data: bytes | None, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Answer | None:
        """Returns the answer to this request; None if there is no valid one.

        `order_id`: the order that the request is about; '' if it is about none. `first_epoch`:
        epoch of the first worker that may have received the request; an older one's answer is
        refused.
        """
        signed = self.decode(data)
        return (
            None
            if signed is None
            else self.check(signed, user_id, request_id, order_id, first_epoch)
        )

    def decode(self, data: bytes | None) -> SignedAnswer | None:
        """Returns an answer that is not checked yet; None if it cannot be read. Its request id says
        what to check it against."""
        if not data:
            return None
        try:
            return read_answer(data)
        except MalformedMessage as error:
            self._refuse("unknown", error.detail)
            return None

    def check(
        self, signed: SignedAnswer, user_id: str, request_id: str, order_id: str, first_epoch: int
    ) -> Answer | None:
        """Returns the answer if it is valid, else None; as `read`."""
        answer, epoch = signed.answer, signed.epoch
        if epoch is None:
            keys = self._secrets.service_keys(user_id)
        else:
            keys = self._secrets.assignment_keys(user_id, epoch)
        if not signed.is_authentic(keys, user_id):
            self._refuse(user_id, "not its author's", author=signed.author)
        elif not signed.is_about(request_id, order_id):
            self._refuse(user_id, "about another request or order", author=signed.author)
        elif epoch is not None and epoch < first_epoch:
            self._refuse(user_id, "a former worker's", author=signed.author)
        elif epoch is not None and answer.outcome is not None and answer.outcome.withdrawn:
            self._refuse(user_id, "a worker withdraws nothing", author=signed.author)
        else:
            return answer
        return None

    def _refuse(self, user_id: str, reason: str, **fields: str) -> None:
        if self.refused.add(user_id):
            log.error(
                "answer_refused", user_id=user_id, reason=reason, count=self.refused.count, **fields
            )
