"""The fields of API keys, allowed images and audit entries in requests and answers."""

from datetime import UTC, datetime
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import Field, computed_field, field_validator, model_validator

from api.http.fields import EMPTY_IS_NONE, Body, PlainText, Reason, UserId, View
from api.http.rights import (
    APPLICATION_SCOPE_PATTERN,
    SCOPES_OF,
    Role,
    Scope,
    jobs_scope,
    known_applications,
)
from api.http.times import AwareTime, QueryStart
from infra.database import api_keys
from infra.database.models import ApiKey
from infra.market.calendar import HOME_ZONE_NAME
from infra.networks import parse_network

#: Networks that a key may list.
MAX_SOURCES = 32
#: Printable ASCII: without spaces, and with them.
IMAGE_PATTERN = r"^[!-~]+$"
TEXT_PATTERN = r"^[ -~]*$"


#: The scope for the jobs of one application.
ApplicationScope = Annotated[str, Field(pattern=APPLICATION_SCOPE_PATTERN)]


class ApiKeyRequest(Body):
    """A new key. A user's key needs the user, who must exist; the other roles have none."""

    role: Role
    user_id: UserId | None = None
    label: str = Field(
        min_length=1, max_length=128, pattern=TEXT_PATTERN, description="What it is for."
    )
    scopes: list[Scope | ApplicationScope] | None = Field(
        default=None,
        min_length=1,
        description="What it may do; null: all that its role may do. `jobs:shop` is for jobs of "
        "the application shop only.",
    )
    sources: list[Annotated[str, Field(max_length=64)]] = Field(
        default_factory=list,
        max_length=MAX_SOURCES,
        description="Addresses or networks (CIDR) that may use it; empty: those of the key "
        "that makes it.",
    )
    expires_at: AwareTime | None = Field(
        default=None, description="When it ends; left out: after 90 days; null: when it is revoked."
    )

    @field_validator("sources")
    @classmethod
    def _are_networks(cls, sources: list[str]) -> list[str]:
        return list(dict.fromkeys(str(parse_network(source)) for source in sources))

    @model_validator(mode="after")
    def _has_a_user_or_not(self) -> Self:
        if (self.role is Role.USER) != (self.user_id is not None):
            raise ValueError("a user's key needs user_id, and only that")
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            raise ValueError("expires_at has passed")
        words = set(self.scopes or ())
        applications = {jobs_scope(name) for name in known_applications(words)}
        allowed = set() if self.role is Role.USER else applications
        if surplus := sorted(words - SCOPES_OF[self.role] - allowed):
            known = ", ".join(sorted(SCOPES_OF[self.role]))
            raise ValueError(
                f"the role {self.role} has no scope {', '.join(surplus)}; it has: {known}"
            )
        return self

    @property
    def ends_at(self) -> datetime | None:
        if "expires_at" in self.model_fields_set:
            return self.expires_at
        return datetime.now(UTC) + api_keys.KEY_LIFETIME


class RotationRequest(Body):
    """Says how long the old key still counts."""

    overlap_hours: float = Field(default=24.0, ge=0, le=720)


_SCOPES = Field(
    description="What it may do; null: all that its role may do (a key from before scopes)."
)
_SOURCES = Field(description="Addresses or networks that may use the key; empty: all.")


class ApiKeyView(View):
    """A key without its token."""

    id: UUID
    prefix: str = Field(description="How the token begins.")
    label: Annotated[str | None, EMPTY_IS_NONE]
    role: Role
    user_id: str | None
    scopes: Annotated[list[str] | None, _SCOPES]
    sources: Annotated[list[str], _SOURCES]
    created_at: datetime
    made_by: UUID | None = Field(description="The API key that made it, where that is known.")
    last_used_at: datetime | None = Field(description="To the minute.")
    expires_at: datetime | None
    revoked_at: datetime | None

    @computed_field(  # type: ignore[prop-decorator]
        description="It was made before there were scopes: rotate it, so that it gets an end."
    )
    @property
    def unrestricted(self) -> bool:
        return self.scopes is None


class NewApiKeyView(View):
    """The token is shown this once."""

    id: UUID
    role: Role
    api_key: str = Field(repr=False)
    scopes: Annotated[list[str] | None, _SCOPES]
    sources: Annotated[list[str], _SOURCES]
    expires_at: datetime | None

    @classmethod
    def of(cls, key: ApiKey, token: str) -> Self:
        return cls(
            id=key.id,
            role=Role(key.role),
            api_key=token,
            scopes=key.scopes,
            sources=key.sources,
            expires_at=key.expires_at,
        )


class MadeWebhookView(View):
    """A webhook that a revoked key had made."""

    id: UUID
    user_id: str
    account_id: str
    label: str
    revoked_at: datetime | None = Field(description="null: it still takes signals.")


class RevokedApiKeyView(ApiKeyView):
    """A key that was revoked, and what it had made that was still in use."""

    webhooks_revoked: int
    webhooks_left: int = Field(description="They still take signals.")
    webhooks: list[MadeWebhookView] = Field(description="The first 100.")
    api_keys: list[ApiKeyView] = Field(
        description="Keys that it had made, and those that these had made: the first 100."
    )


class ApiKeyList(View):
    """A page of keys, the latest first."""

    api_keys: list[ApiKeyView]
    next_cursor: UUID | None = None


class ImageRequest(Body):
    """An image, named exactly: by its digest, or as a revision of a task definition on ECS."""

    image: str = Field(pattern=IMAGE_PATTERN, max_length=512)
    reason: Reason = "requested"


class ImageView(View):
    image: str
    actor: str = Field(description="Who put it on the list.")
    reason: str
    added_at: datetime


class ImageList(View):
    images: list[ImageView]


class AuditQuery(Body):
    """Which entries of the audit trail."""

    actor: PlainText | None = Field(None, max_length=128, description="A part of who did it.")
    action: PlainText | None = Field(
        None, max_length=64, description="How it begins, such as `api_key.`"
    )
    subject: PlainText | None = Field(
        default=None, max_length=160, description="To whom or what, such as `user:alice`."
    )
    since: QueryStart | None = Field(
        default=None,
        description=f"At or after this time. A day begins at midnight in {HOME_ZONE_NAME}.",
    )
    cursor: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="As `next_cursor` says."
    )
    limit: int = Field(default=100, ge=1, le=1000)


class AuditEntryView(View):
    """Says who did what to whom."""

    id: int
    at: datetime
    actor: str = Field(description="The key's label and id, or the part of Berth.")
    action: str
    subject: str
    data: dict[str, Any]


class AuditPage(View):
    entries: list[AuditEntryView]
    next_cursor: int | None
