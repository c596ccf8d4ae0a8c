"""`ackbone config` and `ackbone completion`."""

from __future__ import annotations

import click

from ackbone.core.errors import ConfigError

from .output import dump, safe
from .session import Exit, Session, command, group, refuse, stop


@group("ackbone config show", "ackbone config check")
def config() -> None:
    """Show and check the configuration."""


@command("ackbone config show --origin", "ackbone config show worker --json", of=config)
@click.argument("prefix", required=False)
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
def show(session: Session, prefix: str | None, origin: bool) -> None:
    """Show every setting with its effective value; secrets are masked.

    With PREFIX, show only the settings below it, such as worker or queues.orders.
    """
    settings = [
        setting
        for setting in session.config.describe()
        if prefix is None
        or setting.path == prefix
        or setting.path.startswith((prefix + ".", prefix + "["))
    ]
    for setting in settings:
        record = {"path": setting.path, "value": setting.value, "origin": setting.origin}
        value = setting.value if isinstance(setting.value, str) else dump(setting.value)
        shown = f"{safe(setting.path)}: {safe(value)}"
        session.out.data(record, f"{shown}  # {setting.origin}" if origin else shown)
    if not settings:
        session.out.say(f"ackbone: there is no setting {prefix!r}")
        stop(Exit.NOT_FOUND)


@command("ackbone config check", "ackbone config check --config prod.yaml --json", of=config)
def check(session: Session) -> None:
    """Check the configuration and report every mistake at once (exit code 10).

    It checks everything that a worker needs before it connects: drivers, rules, triggers, channels.
    `ackbone doctor` makes the same checks, and checks the database and the broker, too.
    """
    from ackbone.app import App

    try:
        found = session.config
        App(found).check()
    except ConfigError as error:
        refuse(session, error)
    where = str(found.file) if found.file else "no file: the defaults"
    session.out.data({"ok": True, "problems": [], "file": found.file}, f"ok ({safe(where)})")


@command(
    'eval "$(ackbone completion bash)"',
    "ackbone completion fish > ~/.config/fish/completions/ackbone.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(session: Session, shell: str) -> None:
    """Print a completion script for your shell."""
    from click.shell_completion import get_completion_class

    from .root import cli

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - one of the three that click has
    script = kind(cli, {}, "ackbone", "_ACKBONE_COMPLETE").source()
    session.out.data({"shell": shell, "script": script}, script)
