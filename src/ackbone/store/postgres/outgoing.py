"""Messages that leave with a commit, by the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ackbone.core.store import Send
from ackbone.store.outbox import outbox_row
from ackbone.store.unit import Row

from . import arrays
from .arrays import moment

if TYPE_CHECKING:
    from .database import Tx

_OUTBOX = (
    "INSERT INTO outbox (id, tenant_id, queue_name, message_id, headers, body, body_crc, priority,"
    " ordering_key, ttl_us, due_at, created_at) SELECT u.id, u.tenant, u.queue, u.message,"
    " u.headers, u.body, u.crc, u.priority, u.key, u.ttl,"
    f" {moment('u.due')}, {moment('u.created')}"
    " FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::json[], $6::bytea[],"
    " $7::bigint[], $8::int[], $9::text[], $10::bigint[], $11::bigint[], $12::bigint[]) u(id,"
    " tenant, queue, message, headers, body, crc, priority, key, ttl, due, created)"
)


class PostgresOutgoing:
    """`OutgoingRows` in a transaction: bulk rows are sent together with COMMIT."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def publish(self, sends: Sequence[Send], now_us: int) -> bool:
        rows = [outbox_row(send, now_us) for send in sends]
        self._tx.at_end(_OUTBOX, *_outbox_values(rows))
        return True


def _outbox_values(rows: Sequence[Row]) -> tuple[str, ...]:
    columns = list(zip(*rows, strict=True))
    return (
        arrays.ids(columns[0]),
        *(arrays.texts(columns[n]) for n in range(1, 5)),
        arrays.blobs(columns[5]),
        arrays.numbers(columns[6]),
        arrays.numbers(int(each) for each in columns[7]),
        arrays.texts(columns[8]),
        *(arrays.numbers(columns[n]) for n in range(9, 12)),
    )
