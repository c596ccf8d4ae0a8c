"""Where the replies of a command wait: in the database of the configuration, or in a folder."""

from __future__ import annotations

import functools
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from holdfast.core.errors import NotFound, StoreError

from .session import Session, operator_name

if TYPE_CHECKING:
    from holdfast.core.delivery_desk import DeliveryActs, DeliveryRecords
    from holdfast.delivery.file_deliveries import FileDeliveries

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Acting(NamedTuple):
    """What a command that changes something has open."""

    records: DeliveryRecords
    acts: DeliveryActs
    channels: frozenset[str]
    """Those that a reply has named so far."""


class Place:
    """The one that `--folder` says, or the database."""

    def __init__(self, session: Session, folder: Path | None) -> None:
        self._session = session
        self._folder = folder

    @property
    def option(self) -> str:
        """What a further command has to say to mean the same place."""
        return f" --folder {shlex.quote(str(self._folder))}" if self._folder is not None else ""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[DeliveryRecords]:
        """The replies, to look at."""
        if self._folder is None:
            async with self._session.reading() as records:
                yield records
            return
        deliveries = _opened(self._folder)
        try:
            yield deliveries.desk(by=operator_name())
        finally:
            await deliveries.close()
        broken = deliveries.queue.broken()
        if broken:
            self._session.out.say(
                f"{len(broken)} in {deliveries.queue.broken_dir} cannot be read as replies:"
                " mend them and move them back, or remove them"
            )

    @asynccontextmanager
    async def acting(self) -> AsyncIterator[Acting]:
        """The replies, and what may be done to them."""
        from holdfast.core.delivery_desk import DeliveryFilter

        if self._folder is None:
            async with self._session.acting() as (_, records, operations):
                counts = await records.reply_counts()
                yield Acting(records, operations, frozenset(each.queue for each in counts))
            return
        deliveries = _opened(self._folder)
        try:
            desk = deliveries.desk(by=operator_name())
            here = await desk.deliveries(DeliveryFilter(), limit=1_000_000)
            yield Acting(desk, desk, frozenset(each.channel for each in here))
        finally:
            await deliveries.close()


def place_option(fn: Fn) -> Fn:
    """Adds --folder, and hands over a `Place`."""

    @click.option(
        "--folder",
        type=click.Path(path_type=Path),
        help="Of a folder of files (delivery-queue/), not of the database.",
    )
    @functools.wraps(fn)
    def wrapped(session: Session, *args: Any, folder: Path | None, **options: Any) -> Any:
        return fn(session, *args, place=Place(session, folder), **options)

    return wrapped  # type: ignore[return-value]


def _opened(folder: Path) -> FileDeliveries:
    """Raises NotFound for one that is no queue: nothing is made in it."""
    from holdfast.delivery.file_deliveries import FileDeliveries

    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    if not (folder / "failed").is_dir() and not any(folder.glob("*.json")):
        raise NotFound(
            f"{folder} is no folder of replies: it has neither <id>.json files nor failed/"
        )
    try:
        return FileDeliveries(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be used: {error.strerror}") from error
