"""What an earlier process left to be delivered, said when the next one starts."""

from __future__ import annotations

import contextlib

from holdfast.core.errors import HoldfastError

from .session import Session


def tell_recovery(session: Session) -> None:
    """To people only. Where there is no database yet, or it is away, the workers will say so."""
    if session.out.as_json:
        return
    with contextlib.suppress(HoldfastError):
        report = session.run(_report(session))
        if report:
            session.out.say(report)


async def _report(session: Session) -> str:
    from holdfast.delivery.recovery import store_report

    async with session.reading() as records:
        return await store_report(records)
