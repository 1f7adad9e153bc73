"""The master key in AWS KMS, which the key never leaves.

The API's role may call `kms:Encrypt`, the orchestrator's `kms:Decrypt`. The encryption context
binds a data key to its use. boto3 blocks, so its few calls per claim run in threads.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.vault.key_pairs import KeyUnwrapper, UnknownMasterKey, UnwrapFailed
from worker_runtime.protocol.errors import BerthError


class KmsUnavailable(BerthError, code="KMS_UNAVAILABLE", retryable=True):
    """AWS KMS does not answer, or refuses this role."""


class KmsKeyUnknown(BerthError, code="KMS_KEY_UNKNOWN"):
    """BERTH_MASTER_KMS_KEY is not the ARN of a key. An alias is not accepted."""


#: Seconds to connect, and for an answer: a claim waits for it.
_CONFIG = Config(
    connect_timeout=3, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2}
)


class KmsMasterKey:
    """Wraps and unwraps with one KMS key. `client` is `boto3.client("kms")`.

    `earlier` unwraps what key files have wrapped before the move to KMS.
    """

    def __init__(self, client: Any, key_arn: str, earlier: KeyUnwrapper | None = None) -> None:
        self._client = client
        self._arn = key_arn
        self._earlier = earlier

    @classmethod
    def of_arn(cls, arn: str, earlier: KeyUnwrapper | None = None) -> Self:
        """Calls nothing of AWS yet. Raises `KmsKeyUnknown`."""
        parts = arn.split(":")
        if len(parts) != 6 or parts[2] != "kms" or not parts[5].startswith("key/"):
            raise KmsKeyUnknown
        return cls(boto3.client("kms", region_name=parts[3], config=_CONFIG), arn, earlier)

    @property
    def key_id(self) -> str:
        return f"kms:{self._arn}"

    async def wrap(self, data_key: bytes, context: bytes) -> bytes:
        """Raises `KmsUnavailable`."""
        answer = await self._call(self._client.encrypt, context, Plaintext=data_key)
        return bytes(answer["CiphertextBlob"])

    async def unwrap(self, wrapped: bytes, context: bytes, key_id: str) -> bytes:
        """Raises `UnwrapFailed`, `UnknownMasterKey` or `KmsUnavailable`."""
        if self._earlier is not None and not key_id.startswith("kms:"):
            return await self._earlier.unwrap(wrapped, context, key_id)
        if key_id != self.key_id:
            raise UnknownMasterKey(f"{key_id} is not {self.key_id}")
        answer = await self._call(self._client.decrypt, context, CiphertextBlob=wrapped)
        return bytes(answer["Plaintext"])

    async def _call(self, call: Callable[..., Any], context: bytes, **given: bytes) -> Any:
        bound = {"berth": context.hex()}
        try:
            return await asyncio.to_thread(call, KeyId=self._arn, EncryptionContext=bound, **given)
        except (BotoCoreError, ClientError) as error:
            code = (
                error.response["Error"]["Code"]
                if isinstance(error, ClientError)
                else type(error).__name__
            )
            if code == "InvalidCiphertextException":
                raise UnwrapFailed from None
            raise KmsUnavailable(f"KMS: {code}") from error
