"""Reads when a certificate in PKCS#12 expires.
Runs as a process of its own, with little CPU and memory.

A PKCS#12 comes from a user, and says itself how much work its password costs to check: one of some
bytes can ask for hours of CPU. So the API never opens one (`infra/vault/certificates.py` starts
this). It reads two lines from standard input, Base64 of the file and of the password, and writes
one line of JSON. It imports nothing of ours, so that it starts in the bare interpreter.
"""

import base64
import hashlib
import hmac
import json
import resource
import sys

#: Seconds of CPU; bytes of address space: OpenSSL and Python map about 120 MB.
CPU_S, MEMORY_BYTES = 4, 400 * 1024 * 1024

_SEQUENCE, _INTEGER, _OCTETS, _OID, _CONTEXT = 0x30, 0x02, 0x04, 0x06, 0xA0
_ENDLESS = b"\x30\x80"
_DATA = bytes.fromhex("2a864886f70d010701")
#: Hash functions of a MAC by object identifier, with the bytes of a block.
_HASHES = {
    bytes.fromhex("2b0e03021a"): ("sha1", 64),
    bytes.fromhex("608648016503040201"): ("sha256", 64),
    bytes.fromhex("608648016503040202"): ("sha384", 128),
    bytes.fromhex("608648016503040203"): ("sha512", 128),
    bytes.fromhex("608648016503040204"): ("sha224", 64),
}


class NotPkcs12(Exception):
    """The bytes are no PKCS#12."""


def limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def read(data: bytes, password: str) -> dict[str, object]:
    """Returns `{"result": …}`: `read` with `ends` (Unix seconds), `garbage`, `wrong_password`, or
    `unknown` for what is a PKCS#12 in a form that we cannot open, although a broker's SDK might."""
    try:
        content, mac = _split(data)
    except NotPkcs12:
        return {"result": "garbage"}
    if content is not None and mac is not None and _mac_fits(content, mac, password) is False:
        return {"result": "wrong_password"}
    from cryptography.hazmat.primitives.serialization import pkcs12

    for secret in (password.encode(), None) if not password else (password.encode(),):
        try:
            opened = pkcs12.load_pkcs12(data, secret)
        except MemoryError:
            raise
        except Exception:  # noqa: S112 - whatever it is, this library cannot open it
            continue
        if opened.cert is not None:
            return {
                "result": "read",
                "ends": opened.cert.certificate.not_valid_after_utc.timestamp(),
            }
    return {"result": "unknown"}


def _split(data: bytes) -> tuple[bytes | None, tuple[bytes, bytes, bytes, int] | None]:
    """Returns the authenticated content and the MAC's hash, digest, salt and iterations; None: it
    has none that a password protects. Raises `NotPkcs12`."""
    if data[:2] == _ENDLESS:
        return None, None  # BER without lengths, as some programs write it
    try:
        outer, rest = _element(data, _SEQUENCE)
        version, outer = _element(outer, _INTEGER)
    except IndexError:
        raise NotPkcs12 from None
    if rest or version != b"\x03":
        raise NotPkcs12
    try:
        info, outer = _element(outer, _SEQUENCE)
        kind, info = _element(info, _OID)
        if kind != _DATA or not outer:
            return None, None  # signed with a key in place of a password, or not protected
        content, _ = _element(_element(info, _CONTEXT)[0], _OCTETS)
        mac, _ = _element(outer, _SEQUENCE)
        digest_info, mac = _element(mac, _SEQUENCE)
        salt, mac = _element(mac, _OCTETS)
        iterations = int.from_bytes(_element(mac, _INTEGER)[0]) if mac else 1
        algorithm, digest_info = _element(digest_info, _SEQUENCE)
        digest, _ = _element(digest_info, _OCTETS)
        return content, (_element(algorithm, _OID)[0], digest, salt, iterations)
    except (IndexError, NotPkcs12):
        return None, None  # another form within


def _element(data: bytes, tag: int) -> tuple[bytes, bytes]:
    """Splits one DER element off: its content, and what follows. Raises `NotPkcs12`."""
    if data[0] != tag:
        raise NotPkcs12
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    if start + length > len(data):
        raise NotPkcs12
    return data[start : start + length], data[start + length :]


def _mac_fits(content: bytes, mac: tuple[bytes, bytes, bytes, int], password: str) -> bool | None:
    """Returns whether the password is the file's; None if this kind of MAC is not known here."""
    algorithm, digest, salt, iterations = mac
    if algorithm not in _HASHES or not salt:
        return None
    name, block = _HASHES[algorithm]
    # An empty password is written as two zeros, or as nothing.
    secrets = [password.encode("utf-16-be") + b"\0\0"] + ([] if password else [b""])
    keys = (_derive(name, block, secret, salt, iterations) for secret in secrets)
    return any(hmac.compare_digest(hmac.digest(key, content, name), digest) for key in keys)


def _derive(name: str, block: int, secret: bytes, salt: bytes, iterations: int) -> bytes:
    """Derives the key of a MAC: RFC 7292, appendix B.2, with the identifier 3 and one round of
    output."""
    pad = (secret * block)[: block * -(-len(secret) // block)]
    result = hashlib.new(
        name, b"\3" * block + (salt * block)[: block * -(-len(salt) // block)] + pad
    )
    digest = result.digest()
    for _ in range(iterations - 1):
        digest = hashlib.new(name, digest).digest()
    return digest


def main() -> None:
    limit_resources()
    data, password = (base64.b64decode(line) for line in sys.stdin.buffer.read().split(b"\n")[:2])
    sys.stdout.write(json.dumps(read(data, password.decode())))


if __name__ == "__main__":
    main()
