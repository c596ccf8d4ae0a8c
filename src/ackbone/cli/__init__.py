"""The command line: thin, and quick to start.

`root.py` knows the names and one sentence of each command; the module behind a command is imported
when that command runs. What a command does stands in `ackbone.admin`; here are options, tables and
exit codes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `ackbone` program."""
    from .root import cli

    sys.exit(cli.main(prog_name="ackbone"))
