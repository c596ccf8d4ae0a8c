"""Quotas: what a run is counted under, and what is left of it, in every dialect.

At the claim a unit of `runs` is taken, since a run is sure to happen; what it uses besides is known
when it ends, and is written then. A quota of tokens or cost can therefore be passed by what the
runs that are on their way use: at most as many as there are slots.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ackbone.core.outcome import Duplicate, Park, Rejected, Released
from ackbone.core.quota import UNITS, Quota, QuotaUse
from ackbone.core.store import Finished, QuotasOf, Run

log = logging.getLogger("ackbone.store")

ROOM = 100
"""So many messages look again at a window's end, where no limit says how many may run."""
BACKWARDS_US = 1_000_000
"""A clock that is nudged back over a window's beginning is still in that window."""
COLUMNS = "window_us, window_start, runs, llm_calls, tokens, cost, deferred_until, deferred"


class _Page(msgspec.Struct):
    """A row of `quotas`, while a transaction works on it."""

    window_us: int
    window_start: int
    runs: int = 0
    llm_calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    deferred_until: int | None = None
    deferred: int = 0
    changed: bool = False


class PutOff(msgspec.Struct, frozen=True):
    """A message must wait: for which quota, of which unit, and until when."""

    quota: str
    unit: str
    until_us: int


class QuotaBook:
    """What tenants have used, for one transaction. A dialect finds the rows and writes them."""

    def __init__(self, now_us: int, quotas_of: QuotasOf | None = None) -> None:
        self._now_us = now_us
        self._quotas_of = quotas_of
        self._pages: dict[tuple[str, str], _Page] = {}

    def admit(self, run: Run) -> Run | PutOff:
        """The run, counted under its quotas; or what it has to wait for."""
        quotas = self.asked(run)
        if not quotas:
            return run
        tenant = run.message.tenant_id
        waits = [
            PutOff(quota.name, unit, self._put_off(self._page(tenant, quota), quota))
            for quota in quotas
            if (unit := _used_up(self._page(tenant, quota), quota)) is not None
        ]
        if waits:
            return max(waits, key=lambda wait: wait.until_us)
        for quota in quotas:
            page = self._page(tenant, quota)
            page.runs += 1
            page.changed = True
        return msgspec.structs.replace(run, quotas=quotas)

    def asked(self, run: Run) -> tuple[Quota, ...]:
        """The quotas that a run is counted under."""
        if self._quotas_of is None:
            return ()
        try:
            return tuple(self._quotas_of(run))
        except Exception:  # the guard, asked next, fails for the same reason, and not for all
            log.exception("message %s: its quotas cannot be told", run.message.id)
            return ()

    def correct(self, items: Iterable[Finished]) -> None:
        """What ended runs really used. One that governance, a stop or a known result kept from
        running is none."""
        for item in items:
            run, usage = item.run, item.usage
            back = isinstance(item.outcome, Released | Park | Rejected | Duplicate)
            for quota in run.quotas if usage is not None or back else ():
                page = self._page(run.message.tenant_id, quota)
                if back and page.window_start <= run.claimed_at_us and page.runs > 0:
                    page.runs -= 1
                if usage is not None:
                    page.llm_calls += usage.llm_calls
                    page.tokens += usage.tokens
                    page.cost += usage.cost
                page.changed = True

    def taken(self) -> list[tuple[Any, ...]]:
        """Rows that have changed since they were asked for, in order of their keys: tenant_id,
        name, and COLUMNS."""
        found = []
        for key, page in sorted(self._pages.items()):
            if page.changed:
                found.append((*key, *msgspec.structs.astuple(page)[:-1]))
                page.changed = False
        return found

    def find(self, tenant_id: str, name: str) -> Sequence[Any] | None:
        """COLUMNS of a row, locked against everybody else; None: there is none."""
        raise NotImplementedError

    def _page(self, tenant_id: str, quota: Quota) -> _Page:
        page = self._pages.get((tenant_id, quota.name))
        if page is None:
            page = self._read(tenant_id, quota)
            self._pages[(tenant_id, quota.name)] = page
        return page

    def _read(self, tenant_id: str, quota: Quota) -> _Page:
        """The page of the window that is running; an older one is turned over."""
        window_us, now = quota.window_us, self._now_us
        start = now - now % window_us
        found = self.find(tenant_id, quota.name)
        if found is None:
            return _Page(window_us, start)
        page = _Page(*found)
        if page.window_us != window_us:
            return _Page(window_us, start)
        if page.window_start == start or start < page.window_start < now + BACKWARDS_US:
            return page
        if page.window_start > start:  # the clock was set back: so far ahead nobody has to wait
            return _Page(window_us, start)
        return _Page(window_us, start, deferred_until=page.deferred_until, deferred=page.deferred)

    def _put_off(self, page: _Page, quota: Quota) -> int:
        """When a message looks again: at the end of a window, in the first that has room for it.

        Were all to come back at the end of this one, each window would move the whole backlog.
        """
        end = page.window_start + page.window_us
        if page.deferred_until is None or page.deferred_until < end:
            page.deferred_until, page.deferred = end, 0
        if page.deferred >= (quota.limits.runs or max(page.runs, ROOM)):
            page.deferred_until += page.window_us
            page.deferred = 0
        page.deferred += 1
        page.changed = True
        return page.deferred_until


def _used_up(page: _Page, quota: Quota) -> str | None:
    """The first unit of which nothing is left."""
    for unit in UNITS:
        limit = getattr(quota.limits, unit)
        if limit is not None and getattr(page, unit) >= limit:
            return unit
    return None


def use_of_row(row: Any) -> QuotaUse:
    """A row of `USE` as a record."""
    tenant, name, start, window_us, runs, llm_calls, tokens, cost, waiting = row
    return QuotaUse(
        tenant_id=tenant,
        name=name,
        window_start_us=start,
        window_end_us=start + window_us,
        runs=runs,
        llm_calls=llm_calls,
        tokens=tokens,
        cost=cost,
        waiting=waiting,
    )
