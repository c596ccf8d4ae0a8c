"""Fill Huey's queue: `python -m huey_fill MESSAGES`, one JSON message a line."""

import json
import sys

from huey_app import noop

with open(sys.argv[1], encoding="utf-8") as messages:
    for line in messages:
        noop(json.loads(line))
