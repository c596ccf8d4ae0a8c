"""The command line.

`root.py` has the name and the help line of each command; the module of a command is imported when
that command runs. `ackbone.admin` does the work; this package has options, tables and exit codes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `ackbone` program."""
    from .root import cli

    sys.exit(cli.main(prog_name="ackbone"))
