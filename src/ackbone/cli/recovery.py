"""What an earlier process left to be delivered, said when the next one starts."""

from __future__ import annotations

import contextlib

from ackbone.core.errors import AckboneError

from .session import Session


def tell_recovery(session: Session, *, terminal: bool) -> None:
    """To people only. Where there is no database yet, or it is away, the workers will say so.

    `terminal`: the workers print the replies of that channel.
    """
    if session.out.as_json:
        return
    with contextlib.suppress(AckboneError):
        report = session.run(_report(session, terminal=terminal))
        if report:
            session.out.say(report)


async def _report(session: Session, *, terminal: bool) -> str:
    from ackbone.delivery.recovery import store_report

    carried = {*session.config.channels, *(["terminal"] if terminal else [])}
    async with session.reading() as records:
        return await store_report(records, carried=carried)
