"""Parses IP addresses and networks as settings, proxies and users write them."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Bits in front of the IPv4 address in one that is mapped into IPv6 (`::ffff:192.0.2.1`).
_MAPPED_PREFIX_BITS = 96


def parse_address(text: str) -> Address:
    """Return the address, without its zone; of one mapped into IPv6 the IPv4 address. Raises
    `ValueError`."""
    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def parse_network(text: str, *, strict: bool = True) -> Network:
    """Return the network; of one mapped into IPv6 the IPv4 network, as `parse_address` does.

    `strict` refuses `10.0.0.1/8`, whose address does not fit its length. Raises `ValueError`.
    """
    network = ip_network(text, strict=strict)
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is None or network.prefixlen < _MAPPED_PREFIX_BITS:
        return network
    return IPv4Network((mapped, network.prefixlen - _MAPPED_PREFIX_BITS))


def is_within(address: str, networks: Iterable[Network]) -> bool:
    """Return True for an address of one of these networks; False for any other text."""
    try:
        parsed = parse_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)
