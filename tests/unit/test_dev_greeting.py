"""What `ackbone dev` suggests can be pasted."""

import shlex
from pathlib import Path

import pytest

from ackbone import App, Config
from ackbone.cli.dev_display import Display, _program
from ackbone.cli.output import Output
from ackbone.cli.root import ENTRIES


@pytest.mark.parametrize("queue", ["default", "orders"])
def test_suggested_commands_exist(
    home: Path, capsys: pytest.CaptureFixture[str], queue: str
) -> None:
    app = App(Config(home=home))
    app.on("chat", queue=queue)(lambda ctx: None)
    Display(app, "app.py:app", Output(as_json=False))._greet()
    shown = capsys.readouterr().out.partition("Try in another terminal:\n")[2].partition("\n\n")[0]
    commands = [shlex.split(line) for line in shown.splitlines()]
    assert len(commands) == 3
    program = shlex.split(_program())
    for words in commands:
        assert words[0] == f"ACKBONE_HOME={home}"
        assert words[1 : 1 + len(program)] == program
        assert words[1 + len(program)] in ENTRIES, "the name of a command follows"
