"""The `ackbone` command and the list of subcommands, which are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import NamedTuple

import click

from ackbone import __version__

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Entry(NamedTuple):
    """Module and function of a command, and its line in the help."""

    place: str
    help: str


_RUN = {
    "dev": Entry("running:dev", "Run an app with one worker and show what it does."),
    "run": Entry("running:run", "Run an app's handlers in one or more worker processes."),
    "chat": Entry("chat:chat", "Talk to an app in this terminal and watch its replies."),
}
_WATCH = {
    "send": Entry("sending:send", "Send a message, or a file of messages."),
    "tail": Entry("watching:tail", "Follow the ledger, event by event."),
    "trace": Entry("watching:trace", "Show the life of one message."),
    "stats": Entry("watching:stats", "Show queues, rates, workers and replies."),
}
_PEOPLE = {
    "dlq": Entry("dead_letters:dlq", "List dead letters; replay, edit or discard them."),
    "approvals": Entry(
        "approvals:approvals", "List messages that wait for approval; approve or reject them."
    ),
    "parked": Entry("parked:parked", "List parked messages; resume or discard them."),
    "deliveries": Entry(
        "deliveries:deliveries",
        "List replies; retry, edit or discard them; pause channels.",
    ),
    "queues": Entry("queues:queues", "List, pause and resume queues."),
    "rules": Entry("rules:rules", "Check and test the rules that are applied before each run."),
}
_HEALTH = {
    "doctor": Entry(
        "doctor:doctor", "Check this deployment for anything that could lose messages."
    ),
    "ledger": Entry("maintenance:ledger", "Verify that the ledger was not changed."),
    "migrate": Entry("maintenance:migrate", "Upgrade the database to the newest schema."),
    "recover": Entry("maintenance:recover", "Repair a database that lost commits or was damaged."),
    "config": Entry("configuration:config", "Show and check the configuration."),
    "bench": Entry("maintenance:bench", "Measure the speed on this machine."),
    "completion": Entry("configuration:completion", "Print a completion script for your shell."),
}
SECTIONS: Mapping[str, Mapping[str, Entry]] = {
    "Run": _RUN,
    "Send and watch": _WATCH,
    "Waiting for an operator": _PEOPLE,
    "Maintenance": _HEALTH,
}
ENTRIES: Mapping[str, Entry] = {
    name: entry for section in SECTIONS.values() for name, entry in section.items()
}


def examples(*lines: str) -> str:
    """Return an epilog with examples that click prints without wrapping."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Group(click.Group):
    """A command group that suggests the nearest name for a mistyped command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        names = self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(name, names, 3, 0.5)
            hint = f" Did you mean {' or '.join(repr(each) for each in near)}?" if near else ""
            raise click.UsageError(f"There is no command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """The commands of `ENTRIES`. Only the module of the command that runs is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = ENTRIES.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.place.partition(":")
        command = getattr(importlib.import_module(f"ackbone.cli.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - a test walks through all of them
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, entry.help) for name, entry in section.items()])


@click.group(
    cls=LazyGroup,
    context_settings=CONTEXT,
    epilog="Start with: ackbone dev\n\nHelp for a command: ackbone COMMAND --help",
)
@click.version_option(__version__, "-V", "--version", prog_name="ackbone")
def cli() -> None:
    """A durable message backbone for AI agents: nothing is lost, each message runs once in effect.

    Data goes to standard output, messages for people to standard error; --json writes the data as
    JSON. Settings come from ./ackbone.yaml and from ACKBONE_HOME.
    """
