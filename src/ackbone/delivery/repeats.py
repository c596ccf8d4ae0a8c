"""How a repeat is known: by a key where a channel takes one, by a mark in the text elsewhere.

A part's number is the number of parts that arrived before it: keys differ from part to part, and
are the same on every attempt.
"""

from __future__ import annotations

import hashlib
import uuid

import msgspec

from ackbone.core.delivery import Outbound

MARK = "(may be a repeat) "
"""Whoever splits leaves room for it in every part: the split must not depend on a doubt."""
_NAMESPACE = uuid.UUID("b6a6f0c4-6a5e-5d0b-9a5f-0b9f3f1c9d27")
_NONCE_LENGTH = 25


def marked(reply: Outbound) -> Outbound:
    """The reply, with a mark before its text if it may have arrived already."""
    if not reply.in_doubt:
        return reply
    mark = MARK
    if reply.content.startswith("```"):  # a fence begins its line
        mark = MARK.rstrip() + "\n"
    return msgspec.structs.replace(reply, content=(mark + reply.content).strip())


def key_uuid(reply: Outbound) -> str:
    """The key of the part that is sent now, as a UUID; the first part's is the reply's own id."""
    number = len(reply.receipts)
    if number == 0:
        try:
            return str(uuid.UUID(reply.id))
        except ValueError:
            pass  # ids of other people's are hashed
    return str(uuid.uuid5(_NAMESPACE, f"{reply.id}/{number}"))


def key_short(reply: Outbound) -> str:
    """The same in 25 letters and digits."""
    text = f"{reply.id}/{len(reply.receipts)}"
    return hashlib.sha256(text.encode()).hexdigest()[:_NONCE_LENGTH]
