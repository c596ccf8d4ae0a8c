"""Standard Webhooks signatures: a receiver can check that a request is ours and recent.

`whsec_…` is a shared secret (`v1`, HMAC-SHA256), `whsk_…` a private key (`v1a`, Ed25519). While a
key is being replaced, a request carries the signatures of both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Sequence

from ackbone.core.errors import ConfigError

SHARED, PRIVATE = "whsec_", "whsk_"
_SHARED_BYTES = range(24, 65)
_SEED_BYTES = 32

Sign = Callable[[bytes], str]


class Signer:
    """Signs with every key, the newest first."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raise ConfigError for an invalid key, without showing it."""
        if not keys:
            raise ConfigError(["webhook: a request needs at least one key to be signed with"])
        self._signs = [_sign_with(key, place) for place, key in enumerate(keys, 1)]

    def headers(self, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
        """Return the three headers for exactly these bytes."""
        content = f"{message_id}.{at_s}.".encode() + body
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": " ".join(sign(content) for sign in self._signs),
        }


def _sign_with(key: str, place: int) -> Sign:
    if key.startswith(PRIVATE):
        return _ed25519(_decoded(key.removeprefix(PRIVATE), place), place)
    secret = _decoded(key.removeprefix(SHARED), place)
    if len(secret) not in _SHARED_BYTES:
        raise ConfigError([f"webhook: key {place} has {len(secret)} bytes; a secret has 24 to 64"])

    def sign(content: bytes) -> str:
        digest = hmac.new(secret, content, hashlib.sha256).digest()
        return f"v1,{base64.b64encode(digest).decode()}"

    return sign


def _ed25519(key: bytes, place: int) -> Sign:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if len(key) not in (_SEED_BYTES, 2 * _SEED_BYTES):  # alone, or followed by the public key
        raise ConfigError([f"webhook: key {place} is not an Ed25519 private key (32 or 64 bytes)"])
    private = Ed25519PrivateKey.from_private_bytes(key[:_SEED_BYTES])
    return lambda content: f"v1a,{base64.b64encode(private.sign(content)).decode()}"


def _decoded(text: str, place: int) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError([f"webhook: key {place} is not base64"]) from None
