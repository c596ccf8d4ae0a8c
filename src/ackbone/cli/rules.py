"""`ackbone rules`: the rules that are applied before each run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from ackbone.core.errors import ConfigError, InvalidMessage
from ackbone.core.quota import UNITS, Quota, QuotaUse

from .output import plain, safe, when
from .session import Session, command, group, refuse

if TYPE_CHECKING:
    from ackbone.core.message import Message
    from ackbone.governance.rules import Rule, Ruling

_FILE = click.Path(dir_okay=False, path_type=Path)
_TRUTHS = {True: "matches", False: "does not match", None: "cannot be decided"}


@group("ackbone rules check", "ackbone rules test rules.yaml message.json")
def rules() -> None:
    """Check and test the rules that are applied before each run."""


@command("ackbone rules check", "ackbone rules check rules.yaml --json", of=rules)
@click.argument("file", type=_FILE, required=False)
def check(session: Session, file: Path | None) -> None:
    """Check a rules file and report every mistake at once (exit code 10).

    Without FILE, the file of the configuration is checked.
    """
    from ackbone.config.rules_file import load_rules

    path = file or session.config.rules
    if path is None:
        raise click.UsageError("Give a FILE, or set `rules:` in ackbone.yaml.")
    try:
        found = load_rules(path)
    except ConfigError as error:
        refuse(session, error, file=path)
    record = {"ok": True, "file": path, "problems": [], "rules": len(found.rules)}
    session.out.data(record, f"ok: {len(found.rules)} rules ({safe(path)})")


@command(
    "ackbone rules test rules.yaml message.json",
    "ackbone rules test rules.yaml - --queue orders --json < message.json",
    "ackbone rules test rules.yaml message.json --approved big-payouts",
    of=rules,
)
@click.argument("file", type=_FILE)
@click.argument("message", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--queue", default="default", show_default=True, help="The queue of the message.")
@click.option("--tenant", help="Its tenant, if the message has none.")
@click.option("--type", "type_", help="Its type, if the message has none.")
@click.option(
    "--attempt",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The number of the attempt.",
)
@click.option("--approved", multiple=True, help="A rule that was approved; may be repeated.")
def test(
    session: Session,
    file: Path,
    message: str,
    queue: str,
    tenant: str | None,
    type_: str | None,
    attempt: int,
    approved: Sequence[str],
) -> None:
    """Show the decision of the rules of FILE about a message, and the rule that made it.

    MESSAGE is a file with one standard message as JSON: {"message_type": "payout", "payload": {…},
    "metadata": {"tenant_id": "acme"}}; '-' reads standard input. Nothing is sent or run.
    """
    from ackbone.config.rules_file import load_rules
    from ackbone.governance.rules import Action, decide, facts_of, quotas_for

    found = load_rules(file)
    facts = facts_of(_message(message, tenant, type_), queue=queue, attempt=attempt)
    ruling = decide(found, facts, approved=approved)
    quotas = quotas_for(found, facts)
    session.out.data(_record(ruling, quotas), _sentence(ruling))
    decided = False
    for rule in found.rules:
        if decided and rule.action is not Action.QUOTA:
            continue  # the decision is made
        truth = _TRUTHS[rule.matches(facts)]
        mark = _mark(rule, ruling, quotas)
        session.out.line(f"  {safe(rule.name)} ({rule.action}): {truth}{mark}")
        decided = decided or rule is ruling.rule


@command("ackbone rules usage", "ackbone rules usage --tenant acme --json", of=rules)
@click.option("--tenant", help="Only this tenant.")
async def usage(session: Session, tenant: str | None) -> None:
    """Show how much of their quotas tenants have used in the current window."""
    from ackbone.config.rules_file import load_rules

    limits: dict[str, Quota] = {}
    if session.config.rules is not None:
        found = load_rules(session.config.rules).rules
        limits = {rule.name: rule.quota for rule in found if rule.quota is not None}
    async with session.reading() as records:
        use = await records.quota_use(tenant_id=tenant)
    now = time.time_ns() // 1000
    rows = [_usage_row(_current(each, now), limits.get(each.name)) for each in use]
    columns = ("tenant", "quota", "runs", "llm calls", "tokens", "cost", "until (utc)", "waiting")
    session.out.table(columns, rows, nothing="no quota has been used yet")


def _current(use: QuotaUse, now_us: int) -> QuotaUse:
    """Return the usage of the current window, which is zero if the recorded window is over."""
    window_us = use.window_end_us - use.window_start_us
    if now_us < use.window_end_us:
        return use
    start = now_us - now_us % window_us
    return replace(
        use,
        window_start_us=start,
        window_end_us=start + window_us,
        runs=0,
        llm_calls=0,
        tokens=0,
        cost=0.0,
    )


def _usage_row(use: QuotaUse, quota: Quota | None) -> tuple[dict[str, Any], Sequence[object]]:
    record = {**plain(use), "limits": None if quota is None else quota.limits}
    cells: list[object] = [use.tenant_id, use.name]
    for unit in UNITS:
        used, limit = getattr(use, unit), quota and getattr(quota.limits, unit)
        shown = f"{used:g}" if isinstance(used, float) else str(used)
        cells.append(shown if limit is None else f"{shown} of {limit:g}")
    return record, [*cells, when(use.window_end_us), use.waiting]


def _message(name: str, tenant: str | None, type_: str | None) -> Message:
    from ackbone.admin.sending import Defaults, Line, message_of

    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InvalidMessage(f"{name} cannot be read: {error.strerror}") from None
    return message_of(Line(number=1, text=text), Defaults(type=type_, tenant_id=tenant))


def _record(ruling: Ruling, quotas: Sequence[Quota]) -> dict[str, Any]:
    return {
        "decision": ruling.action,
        "rule": None if ruling.rule is None else ruling.rule.name,
        "reason": ruling.reason,
        "unsure": ruling.unsure,
        "approved": ruling.passed,
        "quotas": quotas,
    }


def _sentence(ruling: Ruling) -> str:
    who = "no rule" if ruling.rule is None else f"rule {ruling.rule.name}"
    unsure = "; its condition cannot be decided for this message" if ruling.unsure else ""
    return safe(f"{ruling.action}: {who} ({ruling.reason}{unsure})")


def _mark(rule: Rule, ruling: Ruling, quotas: Sequence[Quota]) -> str:
    if rule is ruling.rule:
        return ", and decides"
    if rule.name in ruling.passed:
        return ", and was approved"
    return ", and counts it" if rule.quota in quotas else ""
