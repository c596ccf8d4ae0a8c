"""Real worker processes, a killer, and questions to the database. Nothing here sleeps for luck."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psycopg

from ackbone.app import App
from ackbone.config import load_config
from ackbone.core.message import Message
from ackbone.store.ledger import ledger_key
from ackbone.store.ledger_verifier import LedgerReport
from ackbone.store.postgres.verify import verify_ledger as verify_postgres
from ackbone.store.sqlite.verify import verify_ledger
from tests.faults.checker import Kill, Report, Sent, Story, check
from tests.faults.history import History
from tests.faults.oracle import Oracle

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
TARGET = f"{Path(__file__).with_name('app.py')}:app"
PATIENCE_S = 60.0
"""How long something that must happen may take on a slow machine that many share."""
POLL_S = 0.02
LEASE_S = 2.0
SETTINGS = {
    "WORKER__LEASE_S": str(LEASE_S),
    "WORKER__SHUTDOWN_TIMEOUT_S": "2",
    "RETRY__BASE_DELAY_S": "0.01",
    "RETRY__MAX_DELAY_S": "0.6",
    "BREAKER__FAILURES": "1000000",
    "SEND_TIMEOUT_S": "60",
}
_TASKS = "SELECT message_id FROM queue_executions"
FINAL = "('succeeded', 'failed', 'rejected', 'expired', 'discarded', 'duplicate')"


class Busy(NamedTuple):
    """A living worker and how many tasks it runs."""

    worker_id: int
    pid: int
    running: int


class Fleet:
    """Worker processes on one file, the messages sent to them and the kills they suffered."""

    def __init__(self, home: Path, *, seed: int, **settings: object) -> None:
        self.home = home
        self.seed = seed
        self.random = random.Random(seed)
        self.oracle = Oracle(home / "effects")
        url = settings.get("STORE")
        self.database: Path | str = home / "ackbone.db" if url is None else str(url)
        """The store's file, or the URL of its PostgreSQL."""
        self.sent: list[Sent] = []
        self.kills: list[Kill] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._started = 0
        own = {f"ACKBONE__{name}": str(value) for name, value in settings.items()}
        self.variables = {
            "ACKBONE_HOME": str(home),
            "ACKBONE_ORACLE": str(self.oracle.path),
            **{f"ACKBONE__{name}": value for name, value in SETTINGS.items()},
            **own,
        }

    @property
    def environment(self) -> dict[str, str]:
        # The apps import `tests.faults.oracle`, whatever folder pytest was started in.
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.variables}

    @staticmethod
    def now_us() -> int:
        return time.time_ns() // 1000

    # -- processes --------------------------------------------------------------------------------

    def start(self, count: int = 1, *, target: str = TARGET) -> list[subprocess.Popen[bytes]]:
        """Start workers and wait until each has registered."""
        new = [self._spawn(target) for _ in range(count)]
        for process in new:
            self.wait_for(partial(self._is_up, process), f"worker process {process.pid} registers")
        return new

    def _is_up(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, f"worker process {process.pid} ended\n{self.dump()}"
        return self.worker_of(process.pid) is not None

    def supervise(self, workers: int, target: str = TARGET) -> subprocess.Popen[bytes]:
        """A supervisor with its own workers, as `ackbone run` starts it."""
        code = (
            "import sys; from ackbone.processes.supervisor import Supervisor;"
            f" sys.exit(Supervisor({target!r}, workers={workers}, grace_s=20,"
            " say=lambda text: print(text, file=sys.stderr, flush=True)).run())"
        )
        return self._launch([sys.executable, "-c", code])

    def _spawn(self, target: str = TARGET) -> subprocess.Popen[bytes]:
        return self._launch(
            [
                sys.executable,
                "-m",
                "ackbone.processes.worker_process",
                target,
                "--log-level",
                "warning",
            ]
        )

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._started += 1
        with (self.home / f"worker-{self._started}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its own group: children that it starts end with it
            )
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> int | None:
        """SIGKILL; returns the number under which the victim worked."""
        worker_id = self.worker_of(process.pid)
        at_us = self.now_us()
        process.kill()
        process.wait()
        self.processes.remove(process)
        if worker_id is not None:
            self.kills.append(Kill(worker_id=worker_id, at_us=at_us))
        return worker_id

    def replace_the_dead(self) -> None:
        """A new worker for each that died by itself."""
        for process in [each for each in self.processes if each.poll() is not None]:
            self.processes.remove(process)
            self._spawn()

    def pause(self, process: subprocess.Popen[bytes]) -> None:
        """SIGSTOP, outside of a write: a writer that stands still holds up the whole file."""
        if not isinstance(self.database, Path):  # the server ends transactions that stand still
            process.send_signal(signal.SIGSTOP)
            self.wait_for(lambda: _is_stopped(process.pid), "the worker stands still")
            return
        lock = os.open(f"{self.database}.lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            while True:
                process.send_signal(signal.SIGSTOP)
                self.wait_for(lambda: _is_stopped(process.pid), "the worker stands still")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    process.send_signal(signal.SIGCONT)
                    time.sleep(POLL_S * self.random.random())
                    continue
                fcntl.flock(lock, fcntl.LOCK_UN)
                return
        finally:
            os.close(lock)

    def resume(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGCONT)

    def terminate(self, process: subprocess.Popen[bytes], *, grace_s: float = PATIENCE_S) -> int:
        """SIGTERM, and SIGKILL at the end of the grace; returns how it ended."""
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
        self.processes.remove(process)
        return process.wait()

    def close(self) -> None:
        """End whatever is left, children of workers included."""
        groups = [process.pid for process in self.processes]
        groups += [pid for _, pid in self.pids()]
        for group in groups:
            if _belongs_to(group, self.home):
                _end_group(group)
        for process in self.processes:
            process.wait()

    # -- messages ---------------------------------------------------------------------------------

    def app(self) -> App:
        return App(load_config(environ=self.variables, cwd=self.home), name="sender")

    def send(self, messages: Iterable[Mapping[str, Any]], *, at_once: int = 200) -> list[Sent]:
        """Send `{"type": …, "payload": …, options}`; returns when all were accepted."""
        accepted = asyncio.run(_send(self.app(), list(messages), at_once))
        self.sent += accepted
        return accepted

    # -- questions --------------------------------------------------------------------------------

    def rows(self, sql: str, *values: object) -> list[Any]:
        if not isinstance(self.database, Path):
            return postgres_rows(self.database, sql, values)
        if not self.database.exists():
            return []
        uri = f"file:{self.database}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=30)) as conn:
            try:
                return conn.execute(sql, values).fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" in str(error):  # the first worker is just making them
                    return []
                raise

    def one(self, sql: str, *values: object) -> Any:
        found = self.rows(sql, *values)
        return found[0][0] if found else None

    def pids(self) -> list[tuple[int, int]]:
        """(worker_id, pid) of all workers that ever registered."""
        found = self.rows("SELECT worker_id, name FROM workers WHERE name LIKE '%faults@%'")
        return [(worker_id, int(name.rsplit(":", 1)[1])) for worker_id, name in found]

    def worker_of(self, pid: int) -> int | None:
        """The number under which a process works now."""
        found = self.one(
            "SELECT max(worker_id) FROM workers WHERE state = 'alive' AND name LIKE ?",
            f"%faults@%:{pid}",
        )
        return None if found is None else int(found)

    def busy(self) -> list[Busy]:
        """Workers of this fleet that run something, by the database."""
        mine = {process.pid for process in self.processes}
        found = self.rows(
            "SELECT w.worker_id, w.name, count(*) FROM queue_executions q JOIN workers w"
            " ON w.worker_id = q.worker_id WHERE q.status = 'running' AND w.state = 'alive'"
            " GROUP BY 1, 2"
        )
        every = [Busy(i, int(name.rsplit(":", 1)[1]), running) for i, name, running in found]
        return [each for each in every if each.pid in mine]

    def process(self, pid: int) -> subprocess.Popen[bytes]:
        return next(process for process in self.processes if process.pid == pid)

    def finished(self) -> int:
        return int(self.one(f"SELECT count(*) FROM queue_executions WHERE status IN {FINAL}") or 0)

    def has_finished(self, messages: float) -> bool:
        return self.finished() >= messages

    def events(self, event_type: str, task_id: str | None = None) -> int:
        """How many there are of it, of one task or of all."""
        return int(
            self.one(
                "SELECT count(*) FROM event_log WHERE event_type = ?1"
                " AND (CAST(?2 AS text) IS NULL OR task_id = ?2)",
                event_type,
                task_id,
            )
            or 0
        )

    def status(self, message_id: str) -> str | None:
        found = self.one("SELECT status FROM queue_executions WHERE message_id = ?", message_id)
        return None if found is None else str(found)

    def are_running(self, ids: Iterable[str]) -> bool:
        return all(self.status(message_id) == "running" for message_id in ids)

    def is_run_by(self, worker_id: int | None, ids: Iterable[str]) -> bool:
        """Does this worker run all of them?"""
        found = self.rows(
            "SELECT message_id FROM queue_executions WHERE status = 'running' AND worker_id = ?",
            worker_id,
        )
        return set(ids) <= {message_id for (message_id,) in found}

    def new_number(self, process: subprocess.Popen[bytes], old: int | None) -> int | None:
        """The number under which a process registered again; None: not yet."""
        found = self.worker_of(process.pid)
        return None if found == old else found

    # -- waiting ----------------------------------------------------------------------------------

    def wait_for(
        self, look: Callable[[], T | None], what: str, *, patience_s: float = PATIENCE_S
    ) -> T:
        """Ask until the answer is true; what stands in the way is shown when it never is."""
        end = time.monotonic() + patience_s
        while True:
            found = look()
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"waited {patience_s:.0f} s for: {what}\n{self.dump()}")
            time.sleep(POLL_S)

    def wait_until_final(
        self,
        *,
        patience_s: float = PATIENCE_S,
        parked: int = 0,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Until every message sent has ended or was set aside. Progress renews patience."""
        wanted = len(self.sent)
        seen = (-1, 0)
        end = time.monotonic() + patience_s
        while True:
            meanwhile()
            aside = self.one("SELECT count(*) FROM queue_executions WHERE status = 'parked'") or 0
            done = self.finished()
            if done >= wanted - parked and done + aside >= wanted:
                return
            if (done, aside) != seen:
                seen, end = (done, aside), time.monotonic() + patience_s
            if time.monotonic() > end:
                raise AssertionError(
                    f"{done} of {wanted} messages ended ({aside} parked), no progress for"
                    f" {patience_s:.0f} s\n{self.dump()}"
                )
            time.sleep(0.1)

    def dump(self) -> str:
        """The state of things, for whoever has to find out."""
        counts = self.rows("SELECT status, count(*) FROM queue_executions GROUP BY 1")
        left = self.rows(
            "SELECT message_id, status, worker_id, attempt, crashes, due_at, lane, idem_key"
            f" FROM queue_executions WHERE status NOT IN {FINAL} LIMIT 10"
        )
        workers = self.rows("SELECT worker_id, name, state FROM workers ORDER BY 1 DESC LIMIT 12")
        lines = [
            f"seed {self.seed}, {len(self.sent)} sent, {len(self.kills)} kills",
            f"tasks {dict(counts)}, queued {self.one('SELECT count(*) FROM messages')}",
            *(f"  {row}" for row in left),
            *(f"  worker {row}" for row in workers),
            f"processes {[(p.pid, p.poll()) for p in self.processes]}",
        ]
        logs = sorted(self.home.glob("worker-*.log"), key=lambda log: log.stat().st_mtime)
        for log in logs[-4:]:
            lines.append(f"--- {log.name}")
            lines.append(log.read_text(errors="replace")[-1500:])
        return "\n".join(lines)

    # -- verdict ----------------------------------------------------------------------------------

    def check(self, **known: Any) -> Report:
        """Judge, print, and fail with the findings if there are any."""
        story = Story(
            history=History(self.database),
            sent=self.sent,
            effects=self.oracle.effects(),
            kills=self.kills,
            ledger=self._verified(),
            **known,
        )
        report = check(story, seed=self.seed)
        print(f"\n{report.table()}")
        assert report.ok, f"{report.table()}\n{self.dump()}"
        if self.variables.get("ACKBONE__BROKER", "").startswith(("redis:", "unix:")):
            self._check_results(self.variables["ACKBONE__BROKER"])
        return report

    def _verified(self) -> LedgerReport:
        key, file = ledger_key(self.home / "ledger.key"), self.home / "ledger.anchors"
        if isinstance(self.database, Path):
            return verify_ledger(self.database, key, file)
        return verify_postgres(self.database, key, file)

    def _check_results(self, url: str) -> None:
        """Every task that ended was told of on the stream of results, once."""
        from redis import Redis

        ended = {name for (name,) in self.rows(f"{_TASKS} WHERE status IN {FINAL}")}
        with Redis.from_url(url.partition("?")[0]) as client:

            def told() -> list[str]:
                found: Any = client.xrange("stream:result")
                return [fields[b"task_id"].decode() for _, fields in found]

            self.wait_for(lambda: ended <= set(told()), "every end is told")
            twice = [name for name, times in Counter(told()).items() if times > 1]
            assert not twice, f"told more than once: {twice[:10]}"
            assert set(told()) <= ended, "told of a task that did not end"
        print(f"{len(ended)} results, one for each task")


def postgres_rows(url: str, sql: str, values: Sequence[object]) -> list[Any]:
    """Nothing, while the server is away or the tables are not made yet."""
    count = itertools.count(1)
    named = re.sub(r"\?(\d*)", lambda m: f"%(p{m[1] or next(count)})s", sql.replace("%", "%%"))
    given = {f"p{n}": value for n, value in enumerate(values, 1)}
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=2) as conn:
            return conn.execute(named, given).fetchall()
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
        return []


async def _send(app: App, messages: Sequence[Mapping[str, Any]], at_once: int) -> list[Sent]:
    accepted: list[Sent] = []
    async with app:
        for start in range(0, len(messages), at_once):
            part = [Message(**message) for message in messages[start : start + at_once]]
            await app.send_many(part)
            accepted += [
                Sent(id=m.id, key=m.idempotency_key, conversation=m.ordering_key) for m in part
            ]
    return accepted


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def _is_stopped(pid: int) -> bool:
    """All threads: a signal stops them one after the other."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return all(_state(int(thread)) in ("T", "t") for thread in threads)


def _belongs_to(pid: int, home: Path) -> bool:
    """Is it a process of this test? Numbers are used again."""
    try:
        return f"ACKBONE_HOME={home}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _end_group(pid: int) -> None:
    try:
        os.killpg(os.getpgid(pid), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
