"""Writes of many deliveries, in PostgreSQL's form: one statement with an array for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.outbound.send_order import PutOff
from ackbone.core.outbound.settling import AttemptEnd, EndedRow
from ackbone.store.delivery_rows import DeliveryRow, WindowRow

from . import arrays
from .sql.deliveries import END, INSERT, PUT_OFF, SAVE_WINDOWS

if TYPE_CHECKING:
    from .database import Tx


class PostgresDeliveryRows:
    """`ackbone.store.delivery_rows.DeliveryRows` of one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def insert(self, found: Sequence[DeliveryRow]) -> None:
        self._tx.at_end(INSERT, *insert_values(found))

    async def add(self, row: DeliveryRow) -> bool:
        return bool(await self._tx.rows(f"{INSERT} RETURNING 1", *insert_values([row])))

    async def put_off(self, found: Sequence[PutOff]) -> None:
        if found:
            await self._tx.send(
                PUT_OFF,
                arrays.texts([each.due.reply.id for each in found]),
                arrays.numbers(each.until_us for each in found),
                arrays.texts([each.by for each in found]),
            )

    async def end(
        self, batch: Sequence[AttemptEnd], worker_id: int, now_us: int
    ) -> dict[tuple[str, int], EndedRow]:
        first = {(each.id, each.call): each for each in reversed(batch)}.values()
        found = await self._tx.rows(
            END,
            arrays.texts([each.id for each in first]),
            arrays.numbers(each.call for each in first),
            arrays.texts([each.status.value for each in first]),
            arrays.texts([each.error for each in first]),
            arrays.numbers(None if e.wait_us is None else now_us + e.wait_us for e in first),
            arrays.numbers(each.retries for each in first),
            arrays.numbers(None if each.in_doubt is None else int(each.in_doubt) for each in first),
            arrays.texts([each.receipt for each in first]),
            arrays.numbers(each.resent for each in first),
            worker_id,
        )
        return {(id_, call): EndedRow(*rest) for id_, call, *rest in found}

    async def save_windows(self, found: Sequence[WindowRow]) -> None:
        if found:
            keys, states, ends = zip(*found, strict=True)
            values = arrays.texts(keys), arrays.texts(states), arrays.numbers(ends)
            await self._tx.send(SAVE_WINDOWS, *values)


def insert_values(rows: Sequence[DeliveryRow]) -> tuple[str, ...]:
    """Return the arrays of `INSERT`."""
    columns = list(zip(*rows, strict=True))
    return (
        *(arrays.texts(columns[n]) for n in range(8)),
        arrays.numbers(int(each) for each in columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 11)),
        *(arrays.texts(columns[n]) for n in range(11, 13)),
        *(arrays.numbers(columns[n]) for n in range(13, 15)),
    )
