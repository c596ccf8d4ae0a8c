"""`ackbone doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from ackbone.admin import doctor as use
from ackbone.admin.queues import list_queues
from ackbone.core.broker import Examinable
from ackbone.core.errors import AckboneError, ConfigError, NotFound
from ackbone.core.findings import Check, Finding, ok, refused
from ackbone.core.serving import uncarried, unserved

from .output import safe
from .session import Exit, Session, command, stop

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.config.endpoints import Endpoint

_COLOURS = {"ok": "green", "warning": "yellow", "refused": "red"}


@command("ackbone doctor", "ackbone doctor --deep --json")
@click.option("--deep", is_flag=True, help="Also read every page, index and body (slow).")
def doctor(session: Session, deep: bool) -> None:
    """Check this deployment for anything that could lose messages.

    Each check is ok, a warning, or refused, with advice. Exit code 10 if one is refused. Nothing is
    changed.
    """
    findings = _findings(session, deep=deep)
    out = session.out
    for check in findings:
        word = out.tinted(f"{check.finding.value:<8}", _COLOURS[check.finding])
        out.data(check, f"{word}  {safe(check.name):<12}  {safe(check.detail)}")
        if check.hint:
            out.line(f"{'':<24}→ {safe(check.hint)}")
    if not use.healthy(findings):
        stop(Exit.CHECK_FAILED)


def _findings(session: Session, *, deep: bool) -> list[Check]:
    try:
        config = session.config
        storage = session.storage
    except ConfigError as error:
        return use.check_problems(error.problems)
    found = [
        *use.check_settings(
            in_memory=any(e.kind.name == "memory" for e in config.endpoints.values()),
            dedup_may_stop=config.on_dedup_unavailable == "continue",
        ),
        *use.check_subscribers(
            {name: each.channel for name, each in config.subscribers.items()}, config.channels
        ),
        *_of_rules(config),
        *session.run(_of_broker(config)),
    ]
    found = [*_of_config(config, found), *found]
    of_store = storage.examine(deep=deep)
    if all(check.finding is not Finding.REFUSED for check in of_store):
        try:
            of_store = [*of_store, *session.run(_of_records(session))]
        except NotFound:
            pass  # there is no database yet
        except AckboneError as error:
            of_store = [*of_store, refused("database", str(error))]
    return [*found, *of_store]


async def _of_broker(config: Config) -> Sequence[Check]:
    """Check the servers of brokers, if there are any."""
    from ackbone.admin import doctor as use
    from ackbone.brokers.registry import make_broker

    found: list[Check] = []
    for endpoint in config.endpoints.values():
        try:
            broker = make_broker(endpoint.url)
        except ConfigError as error:
            found += use.check_problems(map(endpoint.named, error.problems))
            continue
        queues = [name for name in config.queues if config.endpoint(name) == endpoint]
        checks = use.check_capabilities(
            broker.capabilities,
            ordered=[name for name in queues if config.subscription(name).ordered],
            with_ttl=[name for name in queues if config.queue(name).ttl_s is not None],
            max_bytes=config.max_message_bytes,
        )
        examinable: object = broker
        if isinstance(examinable, Examinable):
            checks = [*await examinable.examine(queues), *checks]
        found += [_named(endpoint, check) for check in checks]
    return found


def _named(endpoint: Endpoint, check: Check) -> Check:
    """Return the check with the name of its broker, if it is not the default one."""
    name = check.name if endpoint.name == "default" else f"{check.name} {endpoint.name}"
    hint = None if check.hint is None else endpoint.named(check.hint)
    return msgspec.structs.replace(check, name=name, detail=endpoint.named(check.detail), hint=hint)


def _of_config(config: Config, found: Sequence[Check]) -> list[Check]:
    """The checks of `ackbone config check`, without mistakes that are in `found` already."""
    from ackbone.app import App

    try:
        App(config).check()
    except ConfigError as error:
        known = {check.detail for check in found}
        return use.check_problems(problem for problem in error.problems if problem not in known)
    return [ok("config", str(config.file) if config.file else "no file; the defaults")]


def _of_rules(config: Config) -> list[Check]:
    """Check the rules file; a worker does not start with a wrong one."""
    from ackbone.config.rules_file import load_rules

    if config.rules is None:
        return []
    try:
        found = load_rules(config.rules)
    except ConfigError as error:
        return [refused("rules", problem) for problem in error.problems]
    return [ok("rules", f"{len(found.rules)} rules in {config.rules}")]


async def _of_records(session: Session) -> list[Check]:
    async with session.reading() as records:
        workers = await records.workers()
        queues, _ = await list_queues(records, session.queues)
        replies = await records.reply_counts()
    return [
        use.check_workers(workers),
        *use.check_queues(queues),
        *use.check_serving(uncarried(replies, workers), unserved(queues, workers)),
    ]
