"""Decode: a delivery becomes a candidate, with a message or with the error why it has none."""

from __future__ import annotations

from msgspec.structs import replace

from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.codecs.values import hash_payload
from ackbone.core.errors import DecodeError
from ackbone.core.ids import derived_id, new_id
from ackbone.core.store import Candidate, Decode


def decoder(sub: Subscription, *, max_bytes: int | None = None) -> Decode:
    """Return the function that decodes the deliveries of one subscription. It never raises."""
    codec = CODECS[sub.codec]
    name = codec.name
    read = codec.decode

    def decode(delivery: Delivery) -> Candidate:
        nameless = delivery.identity is None
        if nameless:
            delivery = replace(delivery, identity=new_id())
        try:
            if not delivery.intact:
                raise DecodeError("the body does not match its checksum: it was changed on disk")
            if max_bytes is not None and len(delivery.body) > max_bytes:
                raise DecodeError(f"{len(delivery.body)} bytes, the limit is {max_bytes}")
            message = read(delivery, sub)
            return Candidate(
                delivery=delivery,
                message=message,
                sha256=hash_payload(message.payload),
                codec=name,
                minted=nameless and message.id == derived_id(sub.queue, delivery.identity or ""),
            )
        except DecodeError as error:
            return Candidate(delivery=delivery, message=None, error=error, codec=name)
        except Exception as error:
            wrapped = DecodeError(f"codec {name} failed: {type(error).__name__}: {error}")
            return Candidate(delivery=delivery, message=None, error=wrapped, codec=name)

    return decode
