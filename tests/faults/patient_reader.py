"""A process that keeps a read transaction open until a line comes in.

python tests/faults/patient_reader.py DATABASE
"""

from __future__ import annotations

import sqlite3
import sys

if __name__ == "__main__":
    conn = sqlite3.connect(sys.argv[1], isolation_level=None)
    conn.execute("BEGIN")
    conn.execute("SELECT count(*) FROM messages").fetchone()
    print("reading", flush=True)
    sys.stdin.readline()
