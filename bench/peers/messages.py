"""The messages to fill a queue with: a file of one JSON object a line, named by the first word."""

import json
import sys
from collections.abc import Iterator
from typing import Any


def messages() -> Iterator[dict[str, Any]]:
    with open(sys.argv[1], encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def batches(size: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for message in messages():
        batch.append(message)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
