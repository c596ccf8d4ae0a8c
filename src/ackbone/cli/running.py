"""`ackbone run` and `ackbone dev`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from ackbone.core.errors import AckboneError

from .session import Exit, Session, command, stop

LEVELS = click.Choice(["debug", "info", "warning", "error", "critical"])
BUNDLED = "ackbone.cli.demo:app"


@command("ackbone run myagent:app --workers 4", "ackbone run examples/echo.py:app --until-idle")
@click.argument("target", metavar="MODULE:APP")
@click.option(
    "--workers", type=click.IntRange(1, 512), default=1, show_default=True, help="Worker processes."
)
@click.option("--until-idle", is_flag=True, help="End when no work is left.")
@click.option("--log-level", type=LEVELS, help="Log level of the workers.")
def run(
    session: Session, target: str, workers: int, until_idle: bool, log_level: str | None
) -> None:
    """Run an app's handlers in one or more worker processes.

    MODULE:APP is a module or a file, and the name of the App in it. A worker that dies is replaced.
    SIGTERM or Ctrl+C stops after the current runs and releases the rest; a second one ends at once.
    """
    from ackbone.processes.supervisor import SETTLE_S, Supervisor

    options = [] if log_level is None else ["--log-level", log_level]
    terminal = sys.stdout.isatty() and not session.out.as_json
    if terminal:
        options.append("--terminal")
    supervisor = Supervisor(
        target,
        workers=workers,
        until_idle=until_idle,
        grace_s=session.config.worker.shutdown_timeout_s + SETTLE_S,
        say=session.out.say,
        ready=session.out.say,
        options=options,
    )
    _tell_recovery(session, terminal=terminal)
    code = supervisor.run()
    session.out.data({"target": target, "workers": workers, "exit_code": _code(code)})
    stop(_code(code))


@command("ackbone dev", "ackbone dev myagent:app")
@click.argument("target", metavar="[MODULE:APP]", required=False)
@click.option(
    "--log-level",
    type=LEVELS,
    help="Log level of the worker (default: warning, and info for your own code).",
)
def dev(session: Session, target: str | None, log_level: str | None) -> None:
    """Run an app with one worker and show what it does.

    Without MODULE:APP it runs ./app.py if there is one, else a bundled agent. It prints replies to
    the terminal and one line for each message that ends; with --json only those lines. Ctrl+C stops
    after the current runs.
    """
    from ackbone.processes.supervisor import SETTLE_S, Supervisor

    from .dev_display import Display

    target = usual_target(target)
    app = session.load_app(target)
    app.check()
    levels = ["--log-level", log_level or "warning", *([] if log_level else ["--users-info"])]
    with Display(app, target, session.out):
        supervisor = Supervisor(
            target,
            workers=1,
            grace_s=app.config.worker.shutdown_timeout_s + SETTLE_S,
            say=session.out.say,
            options=[*levels, *([] if session.out.as_json else ["--terminal"])],
        )
        code = supervisor.run()
    stop(_code(code))


def usual_target(target: str | None) -> str:
    """Return the target, or the default: ./app.py if it exists, else the bundled agent."""
    return target or ("app.py:app" if Path("app.py").is_file() else BUNDLED)


def _code(code: int) -> Exit:
    """Convert the exit code of the supervisor."""
    if code == os.EX_CONFIG:
        return Exit.USAGE
    return Exit.OK if code == 0 else Exit.FAILURE


def _tell_recovery(session: Session, *, terminal: bool) -> None:
    """Report the waiting replies, unless --json is given. The workers report an unusable database.

    `terminal` says that the workers print replies to the terminal.
    """
    if session.out.as_json:
        return
    with contextlib.suppress(AckboneError):
        report = session.run(_report(session, terminal=terminal))
        if report:
            session.out.say(report)


async def _report(session: Session, *, terminal: bool) -> str:
    from ackbone.delivery.recovery_report import store_report

    carried = {*session.config.channels, *(["terminal"] if terminal else [])}
    async with session.reading() as records:
        return await store_report(records, carried=carried)
