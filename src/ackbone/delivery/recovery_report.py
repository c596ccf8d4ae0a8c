"""Reports at a start about deliveries that an earlier process left, in a folder or in a store."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ackbone.core.outbound.delivery import Status
from ackbone.core.outbound.delivery_records import DeliveryFilter, DeliveryRecord, DeliveryRecords
from ackbone.core.records import Records
from ackbone.core.serving import WAITING, uncarried
from ackbone.delivery.files.delivery_queue import DeliveryQueue


class Looking(Records, DeliveryRecords, Protocol):
    """The records that a report reads."""


def recovery_scan(queue: DeliveryQueue) -> dict[str, Any]:
    """Return how many deliveries wait and were given up, and the oldest that waits (or None)."""
    pending = queue.load_pending()
    oldest = None
    if pending:
        first = pending[0]
        oldest = _oldest(first.id, first.channel, first.created_at, first.retry_count)
    return {
        "pending": len(pending),
        "failed": len(queue.load_failed()),
        "oldest_pending": oldest,
    }


def recovery_report(queue: DeliveryQueue) -> str:
    """Return the report about a folder."""
    more = []
    unknown = sum(delivery.sending_since > 0 for delivery in queue.load_pending())
    if unknown:
        more.append(
            f"  Unknown: {_count(unknown, 'item')} may have arrived, and will be sent again"
        )
    broken = queue.broken()
    if broken:
        more.append(f"  Broken:  {_count(len(broken), 'file')} (set aside in broken/ directory)")
    return _words(recovery_scan(queue), failed_are="in failed/ directory", more=more)


async def store_scan(records: Looking) -> dict[str, Any]:
    """Return the same numbers of a store; `unknown` deliveries wait until an operator decides."""
    counts: dict[str, int] = {}
    for each in await records.reply_counts():
        counts[each.kind] = counts.get(each.kind, 0) + each.count
    first = await _first_waiting(records)
    oldest = None
    if first is not None:
        made = first.created_at_us / 1e6
        oldest = _oldest(first.id, first.channel, made, first.retry_count)
    return {
        "pending": sum(counts.get(status, 0) for status in WAITING),
        "failed": counts.get(Status.FAILED, 0),
        "unknown": counts.get(Status.UNKNOWN, 0),
        "oldest_pending": oldest,
    }


async def store_report(records: Looking, *, carried: Collection[str] | None = None) -> str:
    """Return the report about a store; "" if nothing waits, neither for a worker nor an operator.

    `carried`: the channels that the worker will have, if they are known; None: all.
    """
    found = await store_scan(records)
    unknown = found["unknown"]
    elsewhere: dict[str, int] = {}
    if carried is not None:
        replies, workers = await records.reply_counts(), await records.workers()
        elsewhere = uncarried(replies, workers, also=carried)
    if not (found["pending"] or found["failed"] or unknown):
        return ""
    more = []
    if unknown:
        more.append(
            f"  Unknown: {_count(unknown, 'item')} may have arrived"
            " (ackbone deliveries list --status unknown)"
        )
    more += [
        f"  Waiting: {_count(count, 'item')} for {channel}, until a worker has this channel"
        for channel, count in elsewhere.items()
    ]
    failed_are = "ackbone deliveries list --status failed"
    resumes = found["pending"] > sum(elsewhere.values())
    return _words(found, failed_are=failed_are, more=more, resumes=resumes)


async def _first_waiting(records: DeliveryRecords) -> DeliveryRecord | None:
    found: list[DeliveryRecord] = []
    for status in WAITING:
        for name in await records.delivery_ids(DeliveryFilter(status=status), limit=1):
            found += await records.deliveries_named(name, tenant_id=None)
    return min(found, key=lambda each: each.created_at_us, default=None)


def _oldest(delivery_id: str, channel: str, made: float, retry_count: int) -> dict[str, Any]:
    return {
        "id": delivery_id,
        "channel": channel,
        "age_seconds": max(0, int(time.time() - made)),
        "retry_count": retry_count,
    }


def _words(
    found: dict[str, Any], *, failed_are: str, more: Sequence[str], resumes: bool = True
) -> str:
    oldest = found["oldest_pending"]
    pending, failed = _count(found["pending"], "item"), _count(found["failed"], "item")
    if oldest is not None:
        retries = _count(oldest["retry_count"], "retry", "retries")
        pending += f" (oldest: {oldest['age_seconds']}s ago, {retries})"
    if found["failed"]:
        failed += f" ({failed_are})"
    report = ["Delivery Queue Recovery:", f"  Pending: {pending}", f"  Failed:  {failed}", *more]
    if oldest is not None and resumes:
        report.append("  Resuming delivery...")
    return "\n".join(report)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
