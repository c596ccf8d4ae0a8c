"""Statements of the queue, and its rows and messages, each written as the other."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import msgspec

from ackbone.core.broker import TAKE_BYTES, Delivery, Outgoing
from ackbone.core.errors import AckboneError, InvalidMessage, MessageTooLarge
from ackbone.pgserver import arrays
from ackbone.pgserver.arrays import BEGUN, MICROSECOND, NOW, us
from ackbone.pgserver.connections import Row

MAX_BODY = 32 * 1024 * 1024
LONGEST_NAME = 255
"""Longest id and ordering key, in characters."""
_IN_DELAY = f"u.delay * {MICROSECOND}"

INSERT = (
    "INSERT INTO messages (queue, state, priority, message_id, lane, due_at, expires_at, sent_at,"
    " headers, body, body_crc) SELECT $1, CASE WHEN u.delay > 0 THEN 1 ELSE 0 END, u.priority,"
    f" u.id, u.lane, CASE WHEN u.delay > 0 THEN {BEGUN} + {_IN_DELAY} END,"
    f" {BEGUN} + {_IN_DELAY} + u.ttl * {MICROSECOND}, {BEGUN}, u.headers, u.body, u.crc"
    " FROM unnest($2::text[], $3::int[], $4::text[], $5::bigint[], $6::bigint[], $7::json[],"
    " $8::bytea[], $9::bigint[]) WITH ORDINALITY u(id, priority, lane, delay, ttl, headers, body,"
    " crc, n) ORDER BY u.n"
)
_COLUMNS = (
    f"m.seq, m.message_id, m.priority, m.lane, {us('m.expires_at')}, {us('m.sent_at')},"
    " m.deliveries, m.headers::text, m.body, m.body_crc"
)
# In the words of the partial indexes and in their order, so that nothing is sorted, also by a plan
# that was made while the table was small.
_READY = (
    "SELECT r.ctid, octet_length(r.body) AS size FROM messages r"
    " WHERE r.queue = $1 AND r.state = 0 AND r.lane IS"
)
_FREE = f"{_READY} NULL AND r.priority >= $2::int ORDER BY r.queue, r.priority DESC, r.seq"
_KEYED = f"{_READY} NOT NULL ORDER BY r.queue, r.seq"
_LOCKED = "LIMIT {}::int FOR UPDATE SKIP LOCKED"
_FEW = (
    "SELECT b.ctid FROM (SELECT f.ctid, sum(f.size) OVER (ROWS UNBOUNDED PRECEDING) - f.size"
    f" AS before FROM ({{}}) f) b WHERE b.before < {TAKE_BYTES}"
)
_FEW_FREE = _FEW.format(f"{_FREE} {_LOCKED.format('$3')}")
_FEW_KEYED = _FEW.format(f"{_KEYED} {_LOCKED.format('$2')}")
TAKE_FREE = f"DELETE FROM messages m WHERE m.ctid = ANY(ARRAY({_FEW_FREE})) RETURNING {_COLUMNS}"
TAKE_KEYED = f"DELETE FROM messages m WHERE m.ctid = ANY(ARRAY({_FEW_KEYED})) RETURNING {_COLUMNS}"
TAKE_IN_ORDER = (
    f"WITH free AS MATERIALIZED (SELECT k.ctid AS place FROM ({_FEW_KEYED}) k),"
    " edge AS MATERIALIZED (SELECT max(x.seq) AS seq"
    " FROM messages x WHERE x.ctid = ANY(ARRAY(SELECT place FROM free))),"
    " held AS MATERIALIZED (SELECT h.lane, min(h.seq) AS seq FROM messages h"
    " WHERE h.queue = $1 AND h.state = 0 AND h.lane IS NOT NULL"
    " AND h.seq <= (SELECT seq FROM edge) AND h.ctid <> ALL(ARRAY(SELECT place FROM free))"
    " GROUP BY h.lane)"
    " DELETE FROM messages m WHERE m.ctid = ANY(ARRAY(SELECT place FROM free)) AND NOT EXISTS"
    f" (SELECT 1 FROM held h WHERE h.lane = m.lane AND h.seq < m.seq) RETURNING {_COLUMNS}"
)
"""Messages with an ordering key, without those behind a message of their conversation whose row
another session has locked."""
HAS_KEYED = f"{_KEYED} LIMIT 1"
PROMOTE = (
    "UPDATE messages m SET state = 0, due_at = NULL WHERE m.ctid = ANY(ARRAY(SELECT r.ctid"
    f" FROM messages r WHERE r.due_at <= {BEGUN} ORDER BY r.due_at LIMIT 1000"
    " FOR UPDATE SKIP LOCKED))"
)
"""Delayed messages that are due, and received ones whose lease is over."""
_AGAIN_US = 50_000
NEXT_DUE = (
    f"SELECT CASE WHEN m.due_at <= {BEGUN} THEN {_AGAIN_US}"
    f" ELSE {us('m.due_at')} - {us(NOW)} END FROM messages m WHERE m.due_at IS NOT NULL"
    " ORDER BY m.due_at LIMIT 1"
)
"""In how many microseconds the next message is due. One that PROMOTE left although it was due is
locked by another session, or one of very many: look again soon, but not over and over."""
RECEIVE = (
    f"WITH free AS MATERIALIZED (SELECT f.ctid AS place FROM ({_FREE} {_LOCKED.format('$3')}) f),"
    f" keyed AS MATERIALIZED (SELECT k.ctid AS place FROM ({_KEYED} {_LOCKED.format('$3')}) k),"
    " best AS (SELECT x.ctid AS place FROM messages x WHERE x.ctid = ANY(ARRAY("
    "SELECT place FROM free UNION ALL SELECT place FROM keyed))"
    " ORDER BY x.priority DESC, x.seq LIMIT $3::int)"
    " UPDATE messages m SET state = 2, deliveries = m.deliveries + 1,"
    f" due_at = {BEGUN} + $4::bigint * {MICROSECOND}"
    f" WHERE m.ctid = ANY(ARRAY(SELECT place FROM best)) RETURNING {_COLUMNS}"
)
_MINE = "m.seq = u.seq AND m.state = 2 AND m.deliveries = u.n"
_TAGS = "unnest($1::bigint[], $2::int[])"
ACK = f"DELETE FROM messages m USING {_TAGS} u(seq, n) WHERE {_MINE}"
RELEASE = (
    "UPDATE messages m SET state = CASE WHEN u.delay > 0 THEN 1 ELSE 0 END,"
    f" due_at = CASE WHEN u.delay > 0 THEN {BEGUN} + {_IN_DELAY} END"
    f" FROM unnest($1::bigint[], $2::int[], $3::bigint[]) u(seq, n, delay) WHERE {_MINE}"
)
EXTEND = (
    f"UPDATE messages m SET due_at = {BEGUN} + $3::bigint * {MICROSECOND}"
    f" FROM {_TAGS} u(seq, n) WHERE {_MINE}"
)
REJECT = (
    "WITH gone AS (DELETE FROM messages m USING unnest($1::bigint[], $2::int[], $3::text[])"
    f" u(seq, n, reason) WHERE {_MINE} RETURNING m.*, u.reason)"
    " INSERT INTO dead_letters (id, subscription, message_id, queue_name, reason, error, body,"
    " body_info, body_crc, failed_at) SELECT gen_random_uuid(), queue, message_id, queue,"
    f" 'rejected', reason, body, headers, body_crc, {BEGUN} FROM gone"
)
STATS = (
    "SELECT queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1),"
    " count(*) FILTER (WHERE state = 2),"
    " extract(epoch FROM clock_timestamp() - min(sent_at) FILTER (WHERE state = 0))::float8"
    " FROM messages GROUP BY queue ORDER BY queue"
)
_encode = msgspec.json.Encoder().encode
_decode_texts = msgspec.json.Decoder(dict[str, str]).decode
_NO_HEADERS = "{}"


def _decode_headers(headers: str) -> dict[str, str]:
    """Read headers. Another program may have written some that are not text: they become text."""
    try:
        return _decode_texts(headers)
    except msgspec.ValidationError:
        found = msgspec.json.decode(headers)
        given = found.items() if isinstance(found, dict) else [("headers", found)]
        return {n: v if isinstance(v, str) else _encode(v).decode() for n, v in given}


def refusal(queue: str, item: Outgoing) -> AckboneError | None:
    """Return why the table cannot hold a message."""
    if len(item.body) > MAX_BODY:
        return MessageTooLarge(f"{item.id}: {len(item.body)} bytes, the limit is {MAX_BODY}")
    names = (("queue", queue), ("id", item.id), ("ordering key", item.key or ""))
    for what, name in names:
        if len(name) > LONGEST_NAME or "\0" in name:
            return InvalidMessage(
                f"{item.id[:60]!r}: its {what} is longer than {LONGEST_NAME} characters or "
                "contains a NUL"
            )
    try:
        "".join((queue, item.id, item.key or "", *item.headers, *item.headers.values())).encode()
        for seconds in (item.delay_s, item.ttl_s or 0.0):
            int(seconds)
    except (TypeError, ValueError, OverflowError) as error:
        return InvalidMessage(
            f"{item.id[:60]!r}: its names and headers must be text that UTF-8 can write, its delay "
            f"and time to live finite numbers ({error})"
        )
    return None


def insert_values(queue: str, batch: Sequence[Outgoing]) -> tuple[str, ...]:
    """Return the values of INSERT."""
    headers = [_encode(dict(i.headers)).decode() if i.headers else _NO_HEADERS for i in batch]
    return (
        queue,
        arrays.texts([item.id for item in batch]),
        arrays.numbers(int(item.priority) for item in batch),
        arrays.texts([item.key for item in batch]),
        arrays.numbers(int(max(0.0, item.delay_s) * 1e6) for item in batch),
        arrays.numbers(None if i.ttl_s is None else int(i.ttl_s * 1e6) for i in batch),
        arrays.texts(headers),
        arrays.blobs(item.body for item in batch),
        arrays.numbers(zlib.crc32(item.body) for item in batch),
    )


def tags(tags: Collection[tuple[int, int]]) -> tuple[str, str]:
    return arrays.numbers(seq for seq, _ in tags), arrays.numbers(count for _, count in tags)


def by_priority(row: Row) -> tuple[int, int]:
    return -row[2], row[0]


def delivery(row: Row, *, received: bool = False) -> Delivery:
    seq, message_id, priority, lane, expires_at, sent_at, count, headers, body, published = row
    crc = zlib.crc32(body)
    return Delivery(
        body=body,
        headers=_decode_headers(headers) if headers != _NO_HEADERS else {},
        tag=(seq, count),
        identity=message_id,
        count=count if received else count + 1,
        sent_at_us=sent_at,
        priority=priority,
        key=lane,
        expires_at_us=expires_at,
        intact=crc == published,
        crc=crc,
    )
