"""Broker credentials: they come in, are encrypted at once, and never go out."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Base64Bytes, ConfigDict, Field, SecretStr

from api.schemas.fields import Body, View


class BrokerName(StrEnum):
    PAPER = "paper"
    SHIOAJI = "shioaji"


#: Bytes of a certificate in PKCS#12; Shioaji's have about 5,000.
MAX_CERTIFICATE = 32 * 1024

Secret = Annotated[SecretStr, Field(min_length=1, max_length=512)]


class StoreCredentials(Body):
    """What the broker's login needs. Stored encrypted; the API can encrypt but not decrypt."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "broker": "paper",
                    "broker_type": "stock",
                    "simulation": True,
                    "api_key": "your key at the broker",
                    "secret_key": "its secret",
                }
            ]
        },
    )

    broker: BrokerName
    broker_type: Annotated[str, Field(pattern=r"^[a-z_]+$", max_length=16)] = "stock"
    simulation: bool = True
    api_key: Secret
    secret_key: Secret
    person_id: Annotated[SecretStr, Field(max_length=32)] = SecretStr("")
    ca_certificate: Annotated[
        Base64Bytes,
        Field(repr=False, max_length=MAX_CERTIFICATE, description="PKCS#12, Base64."),
    ] = b""
    ca_password: Annotated[SecretStr, Field(max_length=256)] = SecretStr("")


class StoredCredentials(View):
    """What is told about stored credentials: all but the credentials."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "user_id": "alice",
                    "account_id": "9A95-0123456",
                    "broker": "paper",
                    "broker_type": "stock",
                    "simulation": True,
                    "version": 1,
                    "reload_signalled": False,
                }
            ]
        },
    )

    user_id: str
    account_id: str
    broker: str
    broker_type: str
    simulation: bool
    version: Annotated[int, Field(description="Grows with every change.")]
    reload_signalled: Annotated[
        bool, Field(description="The user's running worker was told to load them now.")
    ]
