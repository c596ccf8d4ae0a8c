"""A person at a desk of their own: a process that answers approvals as its standard input says.

Each line is `approve ID` or `reject ID`; each answer is a line of JSON: who won, or what the loser
was told. Started as: answerer.py NAME.
"""

from __future__ import annotations

import asyncio
import json
import sys

from ackbone.admin.approvals import Approvals
from ackbone.app import App
from ackbone.cli.session import operating
from ackbone.core.errors import Conflict


async def answer(name: str) -> None:
    app = App(name="answerer")
    async with app, operating(app) as (records, operations):
        desk = Approvals(records, operations)
        print(json.dumps({"ready": name}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            word, approval_id = line.split()
            say = desk.approve if word == "approve" else desk.reject
            try:
                found = await say(await desk.find(approval_id), by=name)
                said = {"won": True, "state": found.state}
            except Conflict as error:
                said = {"won": False, "told": str(error)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[1]))
