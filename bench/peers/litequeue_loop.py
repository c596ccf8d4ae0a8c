"""litequeue: `python litequeue_loop.py MESSAGES DB` fills, drains (pop, done) and prints the rate.

Its own settings (WAL, synchronous=NORMAL): it does not sync each commit.
"""

import json
import sys
import time

from litequeue import LiteQueue


def main(messages: str, database: str) -> None:
    queue = LiteQueue(database)
    with open(messages, encoding="utf-8") as lines, queue.transaction():
        for line in lines:
            queue.put(line)
    done, begin = 0, time.perf_counter()
    while True:
        message = queue.pop()
        if message is None:
            break
        json.loads(message.data)
        queue.done(message.message_id)
        done += 1
    print(json.dumps({"rate": done / (time.perf_counter() - begin), "count": done}))


if __name__ == "__main__":
    main(*sys.argv[1:])
