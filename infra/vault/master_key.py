"""The master key that the settings choose: a pair of key files, or a key in AWS KMS
(`BERTH_MASTER_KMS_KEY`).

boto3 is loaded for KMS only: it takes 0.2 s and 15 MiB.
"""

from infra.settings import Settings
from infra.vault import key_pairs
from infra.vault.key_pairs import KeyUnwrapper, KeyWrapper, MasterKeyFiles, UnwrapFailed
from worker_runtime.protocol.errors import BerthError

#: The words with which KMS and boto3 call errors after which waiting may help.
_PASSING = ("Throttling", "KMSInternal", "DependencyTimeout", "Timeout", "Connection", "Endpoint")


class MasterKeyRefused(BerthError, code="MASTER_KEY_REFUSED"):
    """AWS KMS refuses what this process does with the master key."""


def master_wrapper(settings: Settings) -> KeyWrapper:
    """Returns the half that encrypts. Raises `KmsKeyUnknown`, or what `load_public` does."""
    if not settings.master_kms_key:
        return key_pairs.load_public(settings.master_public_file)
    from infra.vault.kms import KmsMasterKey

    return KmsMasterKey.of_arn(settings.master_kms_key)


def master_unwrapper(settings: Settings) -> KeyUnwrapper:
    """Returns the half that decrypts. Raises `KmsKeyUnknown`, or what `load_ring` does."""
    present, retired = settings.master_key_file, settings.master_key_retired
    if not settings.master_kms_key:
        return MasterKeyFiles(present, *retired)
    from infra.vault.kms import KmsMasterKey

    earlier = MasterKeyFiles(present, *retired) if present.exists() else None
    return KmsMasterKey.of_arn(settings.master_kms_key, earlier)


async def check_wrapper(settings: Settings) -> None:
    """Encrypts something. Raises `MasterKeyRefused`, or an error after which waiting may help."""
    wrapper = master_wrapper(settings)
    try:
        await wrapper.wrap(bytes(32), b"doctor")
    except BerthError as error:
        raise _told(error) from None


async def check_unwrapper(settings: Settings) -> None:
    """Asks KMS to decrypt what it never encrypted: it says so only to those who may decrypt."""
    unwrapper = master_unwrapper(settings)
    if not settings.master_kms_key:
        return
    arn = settings.master_kms_key
    try:
        await unwrapper.unwrap(arn.rpartition("/")[2].encode() + bytes(64), b"doctor", f"kms:{arn}")
    except UnwrapFailed:
        return
    except BerthError as error:
        raise _told(error) from None


def _told(error: BerthError) -> BerthError:
    passing = not error.retryable or any(word in error.detail for word in _PASSING)
    return error if passing else MasterKeyRefused(error.detail)
