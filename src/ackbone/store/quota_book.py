"""Quotas: what a run is counted under, and what is left of it.

The claim takes a unit of `runs`, because the run is sure to happen. Tokens and cost are known when
it ends, and are written then. A quota of tokens or cost can therefore be exceeded by the runs in
progress: at most as many as there are slots.

There is one row for each tenant and quota, written in the transactions of claim and finish. It is
locked after tasks and keys, before the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ackbone.core.outcome import Duplicate, Park, Rejected, Released
from ackbone.core.quota import UNITS, Quota
from ackbone.core.store import Finished, QuotasOf, Run

from .outcomes import identity_of
from .unit import Identity, Tx

log = logging.getLogger("ackbone.store")

ROOM = 100
"""Messages that are deferred to the same window, if no limit says how many may run."""
BACKWARDS_US = 1_000_000
"""If the clock is set back by less than this over a window's beginning, the window goes on."""
COLUMNS = "window_us, window_start, runs, llm_calls, tokens, cost, deferred_until, deferred"


class _Page(msgspec.Struct):
    """A row of `quotas` while a transaction works on it."""

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
    """A message must wait: the quota, its unit that is exhausted, and until when."""

    quota: str
    unit: str
    until_us: int


class QuotaBook:
    """What tenants have used, for one transaction: `open_for`, `admit` or `correct`, `save`."""

    def __init__(self, tx: Tx, quotas_of: QuotasOf | None = None) -> None:
        self._tx = tx
        self._now_us = 0
        self._quotas_of = quotas_of
        self._asked: dict[Identity, tuple[Quota, ...]] = {}
        self._rows: dict[tuple[str, str], Sequence[Any]] = {}
        self._pages: dict[tuple[str, str], _Page] = {}

    async def open_for(self, runs: Iterable[Run]) -> None:
        """Lock the rows of all quotas that these runs are, or were, counted under.

        They are locked from here to the commit, so that two claims at once cannot both take the
        last unit.
        """
        wanted = {
            (run.message.tenant_id, quota.name)
            for run in runs
            for quota in (run.quotas or self._quotas(run))
        }
        wanted.difference_update(self._rows, self._pages)
        if wanted:
            self._rows |= await self._tx.quotas.lock(sorted(wanted))
        self._now_us = await self._tx.moment()

    def admit(self, run: Run) -> Run | PutOff:
        """The run, counted under its quotas; or the quota that it has to wait for."""
        quotas = self._quotas(run)
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

    def _quotas(self, run: Run) -> tuple[Quota, ...]:
        """The quotas that a run is counted under."""
        if self._quotas_of is None:
            return ()
        identity = identity_of(run)
        if identity not in self._asked:
            try:
                self._asked[identity] = tuple(self._quotas_of(run))
            except Exception:  # the guard, asked next, fails for the same reason, and not for all
                log.exception("message %s: cannot work out its quotas", run.message.id)
                self._asked[identity] = ()
        return self._asked[identity]

    def correct(self, items: Iterable[Finished]) -> None:
        """Count what ended runs really used. A run that governance, a stop or a known result kept
        from running does not count."""
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

    def save(self) -> None:
        """Write the rows that have changed, in the order of their keys."""
        found = []
        for key, page in sorted(self._pages.items()):
            if page.changed:
                found.append((*key, *msgspec.structs.astuple(page)[:-1]))
                page.changed = False
        if found:
            self._tx.quotas.write(found)

    def _page(self, tenant_id: str, quota: Quota) -> _Page:
        page = self._pages.get((tenant_id, quota.name))
        if page is None:
            page = self._read(tenant_id, quota)
            self._pages[(tenant_id, quota.name)] = page
        return page

    def _read(self, tenant_id: str, quota: Quota) -> _Page:
        """The page of the current window. A page of an older window is replaced by a new one."""
        window_us, now = quota.window_us, self._now_us
        start = now - now % window_us
        found = self._rows.get((tenant_id, quota.name))
        if found is None:
            return _Page(window_us, start)
        page = _Page(*found)
        if page.window_us != window_us:
            return _Page(window_us, start)
        if page.window_start == start or start < page.window_start < now + BACKWARDS_US:
            return page
        if page.window_start > start:  # the clock was set back: nobody has to wait for that long
            return _Page(window_us, start)
        return _Page(window_us, start, deferred_until=page.deferred_until, deferred=page.deferred)

    def _put_off(self, page: _Page, quota: Quota) -> int:
        """When a deferred message is due: at the beginning of the first window with room for it.

        If all came back at the end of this one, each window would move the whole backlog.
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
    """The first unit that is exhausted."""
    for unit in UNITS:
        limit = getattr(quota.limits, unit)
        if limit is not None and getattr(page, unit) >= limit:
            return unit
    return None
