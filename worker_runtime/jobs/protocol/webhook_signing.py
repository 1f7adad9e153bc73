"""The signature of webhook deliveries: a receiver can check sender, content and time.

The header `Berth-Signature` is `t=<Unix seconds>,v1=<hex>`, where `v1` is the HMAC-SHA256 of
`<t>.<body>` under the recipient's key. While keys are replaced there is a `v1` for each. The
recipient's key is derived from the fleet's key, so no job and no database holds it. A receiver
compares one `v1` in constant time and refuses a `t` that is minutes old.
"""

import hmac
from collections.abc import Sequence

SIGNATURE_HEADER = "Berth-Signature"
DELIVERY_HEADER = "Berth-Delivery"
EVENT_HEADER = "Berth-Event"
ATTEMPT_HEADER = "Berth-Attempt"
#: Minimum length of the fleet's key.
MIN_KEY_BYTES = 32


def recipient_key(fleet_key: bytes, recipient: str) -> str:
    """Returns the key of one recipient, in hex."""
    return hmac.digest(fleet_key, b"berth-webhook:" + recipient.encode(), "sha256").hex()


def sign_delivery(fleet_keys: Sequence[bytes], recipient: str, at: int, body: bytes) -> str:
    """Returns the header's value; `at` in Unix seconds. The first key is the present one."""
    signed = f"{at}.".encode() + body
    marks = [
        hmac.digest(recipient_key(key, recipient).encode(), signed, "sha256").hex()
        for key in fleet_keys
    ]
    return ",".join([f"t={at}", *(f"v1={mark}" for mark in marks)])
