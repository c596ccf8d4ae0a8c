"""Channels by name, as the `send_fn` of a `DeliveryRunner`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ackbone.core.errors import FinalError, SendUnknown
from ackbone.core.message import DEFAULT_TENANT
from ackbone.core.outbound.delivery import Channel, Outbound, Splits

UNFINISHED = 1000
"""Number of replies whose arrived parts are remembered."""


class _Unfinished(NamedTuple):
    receipts: tuple[str, ...]
    in_doubt: bool
    """The next part may have arrived, too."""
    all_in_doubt: bool
    """All later parts may have arrived, too: another process sent it before."""


class Channels:
    """Sends each reply by the channel that it names; a `send_fn` for `DeliveryRunner`.

    Long replies go in parts. Only this process knows which parts arrived: after a restart all of
    them are sent again, and marked as repeats.
    """

    def __init__(self, *channels: Channel) -> None:
        self._known = {channel.name: channel for channel in channels}
        self._unfinished: dict[tuple[str, str, str], _Unfinished] = {}
        """Replies of which some parts arrived, by id, recipient and content."""

    async def __call__(
        self,
        channel: str,
        recipient: str,
        content: str,
        *,
        delivery_id: str,
        in_doubt: bool = False,
    ) -> None:
        found = self._known.get(channel)
        if found is None:
            known = ", ".join(sorted(self._known)) or "none"
            raise FinalError(f"there is no channel {channel!r:.60}; there are: {known}")
        reply = Outbound(
            id=delivery_id,
            tenant_id=DEFAULT_TENANT,
            channel=channel,
            recipient=recipient,
            content=content,
            in_doubt=in_doubt,
        )
        if isinstance(found, Splits):
            await self._send_parts(found, found, reply)
        else:
            await found.send(reply)

    async def _send_parts(self, channel: Channel, splits: Splits, reply: Outbound) -> None:
        key = (reply.id, reply.recipient, reply.content)  # an edited file is another reply
        known = self._unfinished.pop(key, None)
        before = known or _Unfinished((), reply.in_doubt, reply.in_doubt)
        receipts, in_doubt, all_in_doubt = before
        now = msgspec.structs.replace(reply, receipts=receipts, in_doubt=in_doubt)
        for part in splits.parts(now)[len(receipts) :]:
            doubt = part.in_doubt or all_in_doubt
            this = msgspec.structs.replace(part, receipts=receipts, in_doubt=doubt)
            try:
                receipt = await channel.send(this)
            except BaseException as error:
                silent = isinstance(error, SendUnknown)
                if receipts or silent or known:
                    self._unfinished[key] = _Unfinished(receipts, doubt or silent, all_in_doubt)
                    if len(self._unfinished) > UNFINISHED:
                        del self._unfinished[next(iter(self._unfinished))]
                raise
            receipts = (*receipts, receipt or "")

    def sent_in_part(self, delivery_id: str) -> bool:
        """Return True if some parts of a delivery arrived and others did not."""
        return any(
            key[0] == delivery_id and left.receipts for key, left in self._unfinished.items()
        )

    async def close(self) -> None:
        for channel in self._known.values():
            await channel.close()
