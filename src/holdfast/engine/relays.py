"""Relays: small loops beside the work, in every worker; a role keeps those single that must be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.core.errors import BrokerError, StoreError

log = logging.getLogger("holdfast.engine")


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """One loop: `step` every `every_s`; with a `role`, only by the worker that holds it."""

    name: str
    every_s: float
    step: Callable[[], Awaitable[object]]
    role: str | None = None


async def run_relay(relay: Relay, hold_role: Callable[[str], Awaitable[bool]]) -> None:
    """Runs until cancelled. The store being away is waited out; any other error ends the worker."""
    while True:
        try:
            if relay.role is None or await hold_role(relay.role):
                await relay.step()
        except (StoreError, BrokerError) as error:
            log.warning("%s: %s", relay.name, error)
        await asyncio.sleep(relay.every_s)
