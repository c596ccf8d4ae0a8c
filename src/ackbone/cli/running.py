"""`ackbone run` and `ackbone dev`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from .examples import examples
from .recovery import tell_recovery
from .session import Exit, Session, command_options, stop

LEVELS = click.Choice(["debug", "info", "warning", "error", "critical"])
BUNDLED = "ackbone.cli.demo:app"


@click.command(
    epilog=examples(
        "ackbone run myagent:app --workers 4",
        "ackbone run examples/echo.py:app --until-idle",
    )
)
@click.argument("target", metavar="MODULE:APP")
@click.option(
    "--workers", type=click.IntRange(1, 512), default=1, show_default=True, help="Worker processes."
)
@click.option("--until-idle", is_flag=True, help="End when nothing is left to do.")
@click.option("--log-level", type=LEVELS, help="How much the workers say.")
@command_options
def run(
    session: Session, target: str, workers: int, until_idle: bool, log_level: str | None
) -> None:
    """Run an app's handlers in one or more worker processes.

    MODULE:APP is a module or a file and the name of the App in it. A worker that dies is replaced.
    SIGTERM or Ctrl+C lets running work finish, and hands back the rest; a second one ends at once.
    """
    from ackbone.supervisor import SETTLE_S, Supervisor

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
    tell_recovery(session, terminal=terminal)
    code = supervisor.run()
    session.out.data({"target": target, "workers": workers, "exit_code": _code(code)})
    stop(_code(code))


@click.command(
    epilog=examples(
        "ackbone dev",
        "ackbone dev myagent:app",
    )
)
@click.argument("target", metavar="[MODULE:APP]", required=False)
@click.option(
    "--log-level",
    type=LEVELS,
    help="How much the worker says; else warnings, and lines of your own code from info on.",
)
@command_options
def dev(session: Session, target: str | None, log_level: str | None) -> None:
    """Run an app with one worker and watch what it does.

    Without MODULE:APP it runs ./app.py if there is one, else a small agent that comes along. Shows
    replies to the terminal and a line for each message that ends; with --json the lines alone.
    Ctrl+C drains and ends.
    """
    from ackbone.supervisor import SETTLE_S, Supervisor

    from .display import Display

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
    """What runs if nobody says: the app of this folder, or the one that comes along."""
    return target or ("app.py:app" if Path("app.py").is_file() else BUNDLED)


def _code(code: int) -> Exit:
    """The supervisor's exit code as one of ours."""
    if code == os.EX_CONFIG:
        return Exit.USAGE
    return Exit.OK if code == 0 else Exit.FAILURE
