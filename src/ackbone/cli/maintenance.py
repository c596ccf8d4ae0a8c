"""`ackbone ledger`, `migrate`, `recover` and `bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ackbone.core.errors import NotFound
from ackbone.core.text import counted

from .output import plain, safe, when
from .session import Exit, Session, command, group, stop


@command(
    "ackbone migrate",
    "ackbone migrate --check",
    "ackbone migrate --worker-role agents --api-role pages",
)
@click.option("--check", is_flag=True, help="Change nothing; exit code 10 if the schema is old.")
@click.option(
    "--worker-role", metavar="NAME", help="PostgreSQL: grant this role the rights of workers."
)
@click.option(
    "--api-role",
    metavar="NAME",
    help="PostgreSQL: grant this role the rights to read and approve for one tenant at a time.",
)
def migrate(session: Session, check: bool, worker_role: str | None, api_role: str | None) -> None:
    """Upgrade the database to the newest schema.

    Creates the SQLite file if it does not exist; on PostgreSQL the database must exist, and its
    tables are created. A migration is one transaction. Workers do the same when they start, but on
    PostgreSQL only in an empty database: they refuse an older schema. Roles that do not exist are
    created without a password. Only the owner of the tables can grant rights: --config must connect
    as that owner.
    """
    from ackbone.store.revisions import HEAD

    if check and (worker_role or api_role):
        raise click.UsageError("--check changes nothing: grant roles their rights without it")
    if worker_role is not None and worker_role == api_role:
        raise click.UsageError("workers see all tenants, the API role must not: give two roles")
    found = session.storage.migrate(check=check)
    for each in found:
        words = {
            (False, False): f"is at {HEAD}, the newest",
            (False, True): f"is at {HEAD}, the newest",
            (True, True): f"is at {each.before or 'nothing'}, {HEAD} is the newest",
            (True, False): f"went from {each.before or 'nothing'} to {HEAD}",
        }
        after = each.before if check else HEAD
        record = {"file": each.place, "from": each.before, "to": after, "newest": HEAD}
        session.out.data(record, f"{safe(each.place)} {words[(each.behind, check)]}")
    behind = any(each.behind for each in found)
    if check and behind:
        stop(Exit.CHECK_FAILED)
    if worker_role is not None or api_role is not None:
        _admit(session, worker_role, api_role)


def _admit(session: Session, worker_role: str | None, api_role: str | None) -> None:
    may = {
        "worker": "has the rights of workers: it sees all tenants",
        "api": "sees one tenant at a time, the one that its transaction names",
    }
    for each in session.storage.admit(worker=worker_role, api=api_role):
        new = " (created now: give it a password, or a line in pg_hba.conf)" if each.made else ""
        session.out.data(
            {"role": each.role, "kind": each.kind, "made": each.made},
            f"the role {safe(each.role)} {may[each.kind]}{new}",
        )


@group("ackbone ledger verify", "ackbone ledger verify --json")
def ledger() -> None:
    """Verify that the ledger was not changed."""


@command("ackbone ledger verify", "ackbone ledger verify --json", of=ledger)
def verify(session: Session) -> None:
    """Read the whole ledger and compare it with its chains and anchors.

    Workers may run meanwhile. Exit code 10 if any event before the last anchor was changed, added
    or removed. The key of the anchors is read from ACKBONE_LEDGER_KEY or ledger.key_file.
    """
    from ackbone.store.ledger import ledger_key

    config, out = session.config, session.out
    session.storage.require()
    key = ledger_key(config.ledger_key_file)
    with out.progress("events", None) as advance:
        seen = 0

        def progress(done: int, _total: int) -> None:
            nonlocal seen
            advance(done - seen)
            seen = done

        report = session.storage.verify(key, config.ledger_anchor_file, progress)
    out.data({"ok": report.ok, **plain(report)})
    for finding in report.findings:
        out.line(out.tinted(safe(finding), "red"))
    if report.more_findings:
        out.line(f"and {report.more_findings} more")
    for note in report.notes:
        out.line(safe(note))
    last = f", the last at {when(report.last_anchor_at_us)} UTC" if report.anchors else ""
    out.line(
        f"{counted(report.events, 'event')} in {counted(report.chains, 'chain')}, "
        f"{counted(report.anchors, 'anchor')}{last}; "
        f"{report.not_yet_anchored} not yet anchored"
    )
    out.line("the ledger is intact" if report.ok else "the ledger was changed")
    if not report.ok:
        stop(Exit.CHECK_FAILED)


@command("ackbone recover", "ackbone recover --accept-loss")
@click.option(
    "--accept-loss", is_flag=True, help="Repair the database without the rows that are lost."
)
def recover(session: Session, accept_loss: bool) -> None:
    """Repair a database that lost commits or was damaged.

    Without --accept-loss it only reports what is missing (exit code 10). With it, the files are
    copied first; then the database is rebuilt from every row that can be read.
    """
    from ackbone.store.sqlite import recovery

    out = session.out
    config = session.config
    if config.store_kind != "sqlite":
        raise NotFound(
            "recover repairs SQLite files; this store is on a PostgreSQL server. Restore it with "
            "the tools of the server"
        )
    sound = True
    for path in dict.fromkeys([config.store_file, *config.broker_files]):
        found = recovery.recover(path, accept_loss=True) if accept_loss else recovery.inspect(path)
        sound = sound and found.sound
        out.data({"sound": found.sound, **plain(found)}, safe(found.summary))
        for table in found.tables:
            rows = "cannot be read" if table.rows is None else f"{table.rows} rows"
            bad = f", {table.bad_checksums} changed bodies" if table.bad_checksums else ""
            out.line(f"  {safe(table.name):<18} {rows}{bad}")
        if found.copy:
            out.line(f"  copy of the original files: {safe(found.copy)}")
        for name, count in found.lost_rows.items():
            out.line(f"  lost: {count} rows of {safe(name)}")
        if not accept_loss and not found.sound:
            out.say(
                "Restore the files from a backup if you have one. To repair without the lost rows: "
                "ackbone recover --accept-loss"
            )
    if not sound:
        stop(Exit.CHECK_FAILED)


@command(
    "ackbone bench", "ackbone bench --quick", context_settings={"ignore_unknown_options": True}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(session: Session, arguments: Sequence[str]) -> None:
    """Measure the speed on this machine.

    The benchmark is part of the source tree, not of the package; arguments are passed to it.
    """
    root = _checkout()
    if root is None:
        raise NotFound(
            "the benchmark is not part of the package: clone the repository and run "
            "'make bench' (or this command) in it"
        )
    sys.stdout.flush()
    extra = ["--json"] if session.out.as_json else []
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, "-m", "bench", *arguments, *extra])  # noqa: S606


def _checkout() -> Path | None:
    """Return the source tree around the package or the current folder."""
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "bench" / "__main__.py").is_file() and (folder / "pyproject.toml").is_file():
            return folder
    return None
