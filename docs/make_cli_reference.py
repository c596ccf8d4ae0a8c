"""Write docs/reference/cli.md from the commands themselves: `python docs/make_cli_reference.py`.

A test renders it, too, and fails if the page is not what comes out here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from ackbone.cli.dead_letter_actions import dlq_replay
from ackbone.cli.root import SECTIONS, cli
from ackbone.cli.session import Exit

PAGE = Path(__file__).with_name("reference") / "cli.md"
TOLD = ("config_path", "home", "as_json", "debug")
"""Options that every command has, told once."""
CODES = {
    Exit.OK: "Success.",
    Exit.FAILURE: "An error; the message describes it.",
    Exit.USAGE: "Wrong arguments, or a wrong configuration. All mistakes are listed.",
    Exit.NOT_FOUND: "There is no such message, dead letter, parked message, reply or database.",
    Exit.CONFLICT: "It exists, but is not in the required state; or a short id matches several.",
    Exit.UNAVAILABLE: "The store or the broker is unavailable. Try again.",
    Exit.PARTIAL: "A part was done; the rest is listed.",
    Exit.CHECK_FAILED: "A check found something (`doctor`, `migrate --check`, `ledger verify`).",
    Exit.INTERRUPTED: "Ended by Ctrl+C.",
    Exit.TERMINATED: "Ended by SIGTERM.",
}
HEAD = """# Commands

<!-- Written by docs/make_cli_reference.py from the commands themselves; not edited by hand. -->

Data goes to standard output, messages and progress to standard error. Colours and progress bars
appear only on a terminal. `ackbone COMMAND --help` describes a command.

Every command has these options:

| option | |
|---|---|
| `--config FILE` | Read this file instead of `./ackbone.yaml`. |
| `--home DIR` | Use this folder instead of `./.ackbone`. |
| `--json` | Write JSON, for programs. |
| `--debug` | Show where an error comes from. |
| `-h`, `--help` | Show the help and exit. |
"""


def render() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="ackbone")
    parts = [HEAD, "## Exit codes\n", *_codes()]
    for title, section in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in section:
            command = cli.get_command(context, name)
            if command is not None:
                parts += _command(command, click.Context(command, context, name))
    parts += ["## Programs of their own\n"]
    parts += _command(dlq_replay, click.Context(dlq_replay, info_name="dlq_replay"))
    return "\n".join(parts).rstrip() + "\n"


def _codes() -> Iterator[str]:
    yield "| code | means |\n|---|---|"
    yield from (f"| {code.value} | {CODES[code]} |" for code in Exit)
    yield ""


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"### `{context.command_path}`\n"
    yield _prose(command.help or "") + "\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _command(inner, click.Context(inner, context, name))
        return
    yield f"```\n{context.command_path} {_usage(command)}\n```\n"
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in TOLD]
    if options:
        yield "| option | |\n|---|---|"
        yield from (f"| `{_names(p)}` | {_meaning(p)} |" for p in options)
        yield ""
    if command.epilog:
        lines = [line.strip() for line in command.epilog.splitlines() if line.startswith("  ")]
        yield "```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```\n"


def _prose(text: str) -> str:
    """The help's paragraphs, each on a line of its own."""
    paragraphs = inspect.cleandoc(text).replace("\b\n", "").split("\n\n")
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in paragraphs)


def _usage(command: click.Command) -> str:
    """Own words instead of click's, whose form changes from release to release."""
    words = ["[OPTIONS]"]
    for argument in (p for p in command.params if isinstance(p, click.Argument)):
        word = argument.metavar or _kind(argument) or str(argument.name).upper()
        word = word if argument.required or word.startswith("[") else f"[{word}]"
        words.append(f"{word}..." if argument.nargs != 1 and not word.endswith("...") else word)
    return " ".join(words)


def _names(option: click.Option) -> str:
    plain = option.type.name.removesuffix(" range").upper()
    kind = "" if option.is_flag else f" {option.metavar or _kind(option) or plain}"
    return ", ".join((*option.opts, *option.secondary_opts)) + kind.replace("|", "\\|")


def _kind(parameter: click.Parameter) -> str:
    """The choices that a parameter has."""
    if isinstance(parameter.type, click.Choice):
        return "|".join(str(choice) for choice in parameter.type.choices)
    return ""


def _meaning(option: click.Option) -> str:
    text = (option.help or "").replace("|", "\\|")
    return f"{text} Default: {option.default}." if option.show_default else text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
