"""Several replies as one, for channels of plain texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ackbone.core.delivery import Outbound

BETWEEN = "\n\n"


def joined(
    replies: Sequence[Outbound], parts: Callable[[Outbound], Sequence[Outbound]]
) -> Outbound | None:
    """Their texts with a blank line between them, if they are plain and that is one part."""
    if not all(_is_plain(reply) for reply in replies):
        return None
    content = BETWEEN.join(reply.content for reply in replies)
    found = msgspec.structs.replace(replies[0], content=content)
    return found if len(parts(found)) == 1 else None


def _is_plain(reply: Outbound) -> bool:
    """Nothing but a text, of which no part went out yet, or may have."""
    is_fresh = not reply.receipts and not reply.in_doubt
    return is_fresh and not reply.options and bool(reply.content.strip())
