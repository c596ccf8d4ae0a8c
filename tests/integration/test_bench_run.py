"""The benchmark runs through real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_measures_through_real_processes() -> None:
    """Sizes are too small to tell a speed; it shows that every step works."""
    command = [sys.executable, "-m", "bench", "--scale", "0.005", "--rounds", "1", "--json"]
    done = subprocess.run(
        [*command, "drain", "sends", "latency", "peers"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "ACKBONE_BENCH_PEERS"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {r["section"] for r in found["rows"]} == {"drain", "sends", "latency"}
    assert all(r["best"] > 0 for r in found["rows"] if r["unit"] != "µs")
    assert list(found["skipped"]) == ["peers"], "no environment was named"
    assert not found["failed"]
    assert found["machine"]["cores"] == os.cpu_count()
