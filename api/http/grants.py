"""Checks that an API key gives no other key more than it may do itself."""

from collections.abc import Collection, Sequence

from api.http.auth import Principal
from api.http.errors import GrantTooWide
from api.http.rights import jobs_scope, known_applications
from infra.networks import Network, parse_network


def require_grant(caller: Principal, scopes: Collection[str], sources: Sequence[str]) -> None:
    """Raises `GrantTooWide` for what the caller's key may not do itself."""
    reach = caller.applications_in_reach()
    held = {jobs_scope(name) for name in (known_applications(scopes) if reach is None else reach)}
    if caller.scopes is not None and (surplus := sorted(set(scopes) - caller.scopes - held)):
        raise GrantTooWide(
            f"Your API key does not have the scope {', '.join(f'`{scope}`' for scope in surplus)}, "
            "so it cannot give it to another key. Leave it out, or use a key that has it."
        )
    if caller.sources and not all(
        _is_inside(parse_network(source), caller.sources) for source in sources
    ):
        raise GrantTooWide(
            "Your API key may be used from some addresses only. Name sources that are among them."
        )


def _is_inside(network: Network, others: Sequence[Network]) -> bool:
    return any(
        network.version == other.version and network.subnet_of(other)  # type: ignore[arg-type]
        for other in others
    )
