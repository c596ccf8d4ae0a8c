"""Processes: one parent that watches, N workers that run the app, each under its own number.

A handler that kills its process takes one worker with it; the parent starts another. Messages that
were running in two such workers run in children of a warden, so that others are safe from them.

    ackbone run MODULE:APP --workers 4
    ├── python -m ackbone.supervisor MODULE:APP            (four of them, the workers)
    ├── python -m ackbone.supervisor MODULE:APP --warden   (while there are suspects)
    │   └── python -m ackbone.launcher
    │       └── children that run suspects, a small group or one at a time
    └── python -m ackbone.launcher                         (after the first crash)
        └── workers that replace others
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ackbone.core.errors import (
    AckboneError,
    AppNotLoaded,
    BrokerDenied,
    BrokerUnavailable,
    ConfigError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from ackbone.core.exit_code import fate
from ackbone.core.retry import describe
from ackbone.core.store import Company
from ackbone.launcher import Launcher, Process, end_with_parent
from ackbone.start_report import StartListener, StartReport

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.engine.worker import EngineWorker

log = logging.getLogger("ackbone.supervisor")

TURN_S = 0.001
"""How long a thread keeps the interpreter's lock while another one waits for it."""
EXIT_RECYCLE = 75
"""A worker that must be replaced: a handler of its cannot be ended, or holds up the loop."""
RESTART_MAX_S = 10.0
HEALTHY_S = 10.0
"""A worker that stays up this long counts as a successful start."""
SETTLE_S = 5.0
"""On top of the workers' own limit for finishing: time to hand back and to close."""
QUIET_S = 1.5
"""A process for suspects ends when none has waited or run for so long."""
MOST_FAILED_STARTS = 5
"""In a row; after that another start helps as little, unless other workers are up."""


def load_app(target: str) -> App:
    """`module:attribute` or `path/to/file.py:attribute` (attribute `app` if left out).

    Raises AppNotLoaded if the code of the module fails, and ConfigError if there is no App, or if
    it brings a configuration that contradicts the command's.
    """
    from ackbone.app import App

    place, _, attribute = target.partition(":")
    attribute = attribute or "app"
    try:
        if place.endswith(".py"):
            path = Path(place).resolve()
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.exists():
                raise ConfigError([f"{target}: there is no file {path}"])
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(path.stem, module)
            sys.path.insert(0, str(path.parent))
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
    except AckboneError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{place}.".startswith(f"{missing}."):
            hint = "Give it as MODULE:APP or path/to/file.py:APP"
            raise ConfigError([f"{target}: {error}. {hint}"]) from error
        where = "".join(traceback.format_list(_frames_of_the_app(error)))
        text = f"{target} could not be loaded: {describe(error)}\n{where}".rstrip()
        raise AppNotLoaded(text) from error
    app = getattr(module, attribute, None)
    if app is None:
        raise ConfigError([f"{target}: {place} has no attribute {attribute!r}"])
    if not isinstance(app, App):
        raise ConfigError([f"{target} is a {type(app).__name__}, not an ackbone App"])
    app.target = target
    _check_whose_configuration(app)
    return app


def _check_whose_configuration(app: App) -> None:
    """The app's own configuration must not differ from what the command or the environment names:
    other commands would look into another database than the workers."""
    own = app.own_configuration
    if own is None:
        return
    file = own if isinstance(own, Path) else own.file
    named = os.environ.get("ACKBONE_CONFIG")
    if named and (file is None or file.absolute() != Path(named).absolute()):
        _contradict(app, str(file or "a Config made in Python"), named, "config")
    home = os.environ.get("ACKBONE_HOME")
    if home and app.config.home.absolute() != Path(home).expanduser().absolute():
        _contradict(app, f"home {app.config.home}", home, "home")


def _contradict(app: App, own: str, named: str, option: str) -> NoReturn:
    raise ConfigError(
        [
            f"{app.target} has a configuration of its own ({own}), and this command is told to use "
            f"{named} (--{option} or ACKBONE_{option.upper()}). Write App() in the program, or "
            "leave the option and the variable out"
        ]
    )


def _frames_of_the_app(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it was raised, without the way there through the import system and ourselves."""
    ours = str(Path(__file__).parent)
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", ours))
        and Path(frame.filename).parent.name != "importlib"
    ]


class _Place:
    """One worker's place: the process in it, or when the next one starts."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.crashed = False
        """The last process ended by a crash after it had begun to run messages."""
        self.since = 0.0
        self.restart_at = 0.0
        self.failures = 0
        """Ends in a row, each soon after its start."""
        self.failed_starts = 0
        """Those among them, in a row, that were the start's own fault and no message's."""
        self.last_words = ""
        self.refusal: AckboneError | None = None
        """Why its last start was refused, if the next one would be, too."""
        self.summary: str | None = None
        """What its worker serves, once one has come up."""
        self.drain_s = 0.0
        """How long that worker lets running work finish: an app may have settings of its own."""
        self.done = False
        self._listener: StartListener | None = None

    @property
    def is_up(self) -> bool:
        """Is there a process, and has it begun to work?"""
        return self.process is not None and self._listener is not None and self._listener.is_up

    def listen(self) -> None:
        if self.summary is None and self._listener is not None and self._listener.is_up:
            self.summary = self._listener.summary
            self.drain_s = self._listener.drain_s

    def heard_of_suspects(self) -> bool:
        """Does its process say that messages wait for child processes?"""
        return self._listener is not None and self._listener.heard_of_suspects()

    def start(self, target: str, options: Sequence[str], launcher: Launcher | None) -> None:
        self._listener = listener = StartListener()
        self.refusal = None
        try:
            if self.crashed:
                options = [*options, "--cautious"]
            if launcher is not None:
                self.process = launcher.start([target, *options], report_fd=listener.theirs)
            else:
                report = ["--report-fd", str(listener.theirs)]
                self.process = spawn(target, [*options, *report], pass_fds=[listener.theirs])
        except OSError:
            listener.close()
            raise
        finally:
            listener.handed_over()
        self.since = time.monotonic()

    def ended(self, code: int) -> bool:
        """Take its end down. True if it came up and stopped by itself, and nothing was wrong.

        The exit code alone does not say: a message may end a worker with any code.
        """
        self.process = None
        soon = time.monotonic() - self.since < HEALTHY_S
        self.failures = self.failures if soon else 0
        well = in_order = False
        if self._listener is not None:
            self._listener.close()
            self.last_words = self._listener.last_words
            self.refusal = self._listener.refusal
            stopped = self._listener.has_stopped
            well = self._listener.is_up and not (soon and stopped and code == os.EX_SOFTWARE)
            in_order = well and stopped and code == os.EX_OK
            worked = self._listener.has_worked
            self.crashed = well and worked and not in_order and code != EXIT_RECYCLE
        self.failed_starts = 0 if well else self.failed_starts + 1
        return in_order

    def pause_s(self, code: int) -> float:
        """How long to wait after it ended: longer each time it fails soon after its start, but not
        at all after a crash while it ran messages."""
        if code == EXIT_RECYCLE or self.crashed:
            return 0.0
        self.failures += 1
        return min(RESTART_MAX_S, 0.1 * 2.0 ** (self.failures - 1))


class Supervisor:
    """Keeps N workers running until told to stop."""

    def __init__(
        self,
        target: str,
        *,
        workers: int = 1,
        until_idle: bool = False,
        grace_s: float = 35.0,
        say: Callable[[str], None] = lambda text: None,
        ready: Callable[[str], None] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`ready` gets one line once all workers have come up."""
        self._target = target
        self._until_idle = until_idle
        name = uuid.uuid4().hex
        self._options = [*(["--until-idle"] if until_idle else []), "--parent", name, *options]
        self._warden_options = ["--warden", "--parent", name, *_log_level(options)]
        self._launcher: Launcher | None = None
        self._grace_s = grace_s
        self._say = say
        self._ready = ready
        self._said = ""
        """The words of the last failed start, which are not repeated."""
        self._places = [_Place() for _ in range(workers)]
        self._warden = _Place()
        self._stop_by: float | None = None
        self._was_up = False
        """Some worker has begun to work: a login that is refused later may be a password change."""
        self._code = 0

    def run(self) -> int:
        """Returns the exit code: 0 after an orderly stop, else why the workers cannot run.

        Raises ConfigError or AppNotLoaded if that is why none of them could start at all.
        """
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        while True:
            for place in self._places:
                self._look(place)
                place.listen()
                self._allow(place.drain_s + SETTLE_S)
            self._tell_ready()
            self._check_refusals()
            self._look_at_warden()
            if all(place.done for place in self._places):
                return self._end()
            time.sleep(0.02)

    def stop(self, *_: object) -> None:
        """Ask the workers to drain; asked twice, end them at once."""
        first = self._stop_by is None
        if first:
            self._stop_by = time.monotonic() + self._grace_s
        for place in (*self._places, self._warden):
            if place.process is not None:
                place.process.send_signal(signal.SIGTERM if first else signal.SIGKILL)

    def _allow(self, grace_s: float) -> None:
        """Give workers this long to stop, if it is longer than what they have."""
        more_s = max(0.0, grace_s - self._grace_s)
        self._grace_s += more_s
        if self._stop_by is not None:
            self._stop_by += more_s

    def _tell_ready(self) -> None:
        if self._ready is None or any(place.summary is None for place in self._places):
            return
        ready, self._ready = self._ready, None
        n = len(self._places)
        workers = "1 worker" if n == 1 else f"{n} workers"
        ready(f"ready: {workers}, {self._places[0].summary}")

    def _check_refusals(self) -> None:
        """Raise the refusal if it is everybody's: no worker has ever come up, none is starting."""
        refusals = [place.refusal for place in self._places if place.refusal is not None]
        if refusals and all(
            place.process is None and place.summary is None for place in self._places
        ):
            raise refusals[0]

    def _look(self, place: _Place) -> None:
        if place.done:
            return
        if place.process is None:
            if self._stop_by is not None:
                place.done = True
            elif time.monotonic() >= place.restart_at and not self._is_undecided(place):
                self._start(place, self._options, forked=place.crashed)
            return
        self._was_up = self._was_up or place.is_up
        code = place.process.poll()
        if code is None:
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                self._say(
                    f"worker {place.process.pid} did not stop in {self._grace_s:.0f} s: killed"
                )
                place.process.kill()
                place.process.wait()
            return
        self._ended(place, place.process.pid, code)

    def _is_undecided(self, place: _Place) -> bool:
        """Its start was refused, and no worker has come up that shows that others are not."""
        return place.refusal is not None and all(each.summary is None for each in self._places)

    def _look_at_warden(self) -> None:
        """Keep a process that looks after suspects while workers say that there are some."""
        asked = [place.heard_of_suspects() for place in self._places]
        warden = self._warden
        if warden.process is not None:
            code = warden.process.poll()
            if code is not None:
                self._warden_ended(warden.process.pid, code)
        elif any(asked) and self._stop_by is None and time.monotonic() >= warden.restart_at:
            self._start(warden, self._warden_options, forked=True)

    def _warden_ended(self, pid: int, code: int) -> None:
        warden = self._warden
        warden.ended(code)
        if code == os.EX_OK or self._stop_by is not None:
            return
        pause_s = warden.pause_s(code)
        warden.restart_at = time.monotonic() + pause_s
        why = f": {warden.last_words}" if warden.last_words else ""
        self._say(
            f"the process {pid} that looks after messages which crashed their workers ended"
            f" ({fate(code)}){why}; another one starts in {pause_s:.1f} s"
        )

    def _end(self) -> int:
        """All workers are done: so is the warden."""
        warden = self._warden.process
        if warden is not None:
            warden.send_signal(signal.SIGTERM)
            try:
                warden.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                warden.kill()
        if self._launcher is not None:
            self._launcher.close()
        return self._code

    def _crash_launcher(self) -> Launcher | None:
        """The launcher, started now if there is none; None if it cannot be started."""
        if self._launcher is None:
            try:
                self._launcher = Launcher()
            except OSError as error:
                self._say(f"no launcher: {error}")
        return self._launcher

    def _start(self, place: _Place, options: Sequence[str], *, forked: bool) -> None:
        try:
            self._begin(place, options, forked=forked)
        except OSError as error:  # no room for another process: the others must go on
            if not self._was_up:
                raise
            place.crashed = False
            pause = place.pause_s(os.EX_OSERR)
            place.restart_at = time.monotonic() + pause
            self._say(f"a process could not be started ({error}); next try in {pause:.1f} s")

    def _begin(self, place: _Place, options: Sequence[str], *, forked: bool) -> None:
        launcher = self._crash_launcher() if forked else None
        try:
            place.start(self._target, options, launcher)
        except OSError as error:
            if launcher is None:
                raise
            self._say(f"the launcher failed ({error}); workers are started without it")
            self._launcher = None
            place.start(self._target, options, None)
        if self._stop_by is not None and place.process is not None:
            # Told to stop while it was being started: it was in no place to be asked.
            place.process.send_signal(signal.SIGTERM)

    def _ended(self, place: _Place, pid: int, code: int) -> None:
        if place.ended(code) or self._stop_by is not None:
            place.done = True
        elif code == os.EX_NOPERM and not self._was_up:
            self._say("giving up: correct the settings, then run this again. Messages are kept.")
            self._end_all(place, 1)
        elif self._is_hopeless(place, code):
            self._say(f"worker {pid} ended ({fate(code)}), too: giving up. {self._why(place)}")
            self._end_all(place, 1)
        else:
            pause = place.pause_s(code)
            place.restart_at = time.monotonic() + pause
            self._tell_ended(place, pid, code, pause)

    def _tell_ended(self, place: _Place, pid: int, code: int, pause: float) -> None:
        why = ""
        if place.refusal is not None:
            if all(each.summary is None for each in self._places):
                return  # said when it is clear whether any worker can start
            why = f": {place.last_words}" if place.last_words != self._said else ": as before"
            self._said = place.last_words
        self._say(f"worker {pid} ended ({fate(code)}){why}; another one starts in {pause:.1f} s")

    def _is_hopeless(self, place: _Place, code: int) -> bool:
        """Nobody is up, and starting has failed again and again."""
        if code in (os.EX_UNAVAILABLE, os.EX_NOPERM) and not self._until_idle:
            return False  # a store or broker that is away may come back
        starts = place.failed_starts
        return starts >= MOST_FAILED_STARTS and not any(each.is_up for each in self._places)

    def _why(self, place: _Place) -> str:
        words = "".join(f"\n  {line}" for line in place.last_words.splitlines())
        said = f"The last one said:{words}" if words else "The last one could not say why."
        return (
            f"{place.failed_starts} starts in a row failed before any work began. {said}\n"
            f"Mend what stops {self._target} from starting, then run this again. Messages are kept."
        )

    def _end_all(self, place: _Place, code: int) -> None:
        self._code = code
        place.done = True
        self.stop()


def spawn(
    target: str, options: Sequence[str] = (), *, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A worker process; it ends with its parent."""
    command = [sys.executable, "-m", "ackbone.supervisor", target, *options]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        preexec_fn=end_with_parent,  # noqa: PLW1509 - one system call, takes no lock
    )


def _log_level(options: Sequence[str]) -> list[str]:
    """The option of a worker that its warden needs, too."""
    if "--log-level" not in options:
        return []
    at = list(options).index("--log-level")
    return list(options[at : at + 2])


async def work(  # noqa: PLR0913 - the options of the command
    target: str,
    *,
    report: StartReport | None = None,
    company: Company = Company.ANY,
    warden: bool = False,
    cautious: bool = False,
    parent: str | None = None,
    until_idle: bool = False,
    terminal: bool = False,
    log_level: str | None = None,
    users_info: bool = False,
) -> int:
    """The body of one worker process. `terminal`: it prints the replies of that channel."""
    from ackbone.observe.logs import configure_logs, identify
    from ackbone.services import relays_of

    report = report or StartReport(None)
    app = load_app(target)
    configure_logs(
        level=log_level or app.config.log.level,
        format=app.config.log.format,
        users_info=users_info,
    )
    if company is Company.ANY and not warden:
        app.check()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    child = company is not Company.ANY
    async with app:
        # Before this nothing has begun, so a signal may end the process at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if warden:
            return await _guard(app, target, report, parent, log_level, stop)
        relays = relays_of(
            app,
            spawn_solo=not child,
            carry=not child,
            terminal=terminal,
            child=child,
            report=report,
        )
        worker = app.worker(
            company=company,
            cautious=cautious,
            parent=parent,
            relays=relays,
            end_process=_give_way,
            on_work=report.works,
        )
        identify(lambda: worker.worker.worker_id)
        if not await _begins(worker, stop):
            return os.EX_OK
        _tune_interpreter()
        report.up(app.summary(), drain_s=app.config.worker.shutdown_timeout_s)
        waits: set[asyncio.Task[Any]] = {
            asyncio.create_task(stop.wait()),
            asyncio.create_task(worker.stopped.wait()),
        }
        if until_idle or child:
            over = _no_suspects(app, worker, company) if child else app.idle(worker)
            waits.add(asyncio.create_task(over))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        drained = await worker.drain(0.0 if worker.recycle else None)
        report.stops()
        log.info("finished %d, handed back %d", drained.finished, drained.handed_back)
        code = os.EX_OK if worker.failure is None else os.EX_SOFTWARE
        if worker.recycle:
            code = EXIT_RECYCLE
        if worker.running or worker.recycle:
            # Threads, and coroutines that swallow their cancellation. They are handed back when
            # this process is gone, so it must not wait for them.
            _exit(code)
    return code


async def _begins(worker: EngineWorker, stop: asyncio.Event) -> bool:
    """Start the worker. False: it was told to stop while it waited for the store."""
    starting = asyncio.create_task(worker.begin())
    told = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        await worker.drain(0.0)
        return False
    await starting
    return True


async def _guard(
    app: App,
    target: str,
    report: StartReport,
    parent: str | None,
    log_level: str | None,
    stop: asyncio.Event,
) -> int:
    """The body of a warden: look after children while there are suspects."""
    from ackbone.engine.relays import Relay
    from ackbone.observe.logs import identify
    from ackbone.warden import STEP_S, Warden

    warden = Warden(app, target, [] if log_level is None else ["--log-level", log_level])
    step = Relay(name="children", every_s=STEP_S, step=warden.step)
    worker = app.worker(warden=True, parent=parent, relays=[step], end_process=_give_way)
    identify(lambda: worker.worker.worker_id)
    await worker.begin()
    report.up()
    end = None
    quiet_since = time.monotonic()
    while not worker.stopped.is_set():
        if stop.is_set() and not warden.is_stopping:
            end = time.monotonic() + app.config.worker.shutdown_timeout_s
            warden.stop()
        now = time.monotonic()
        if warden.children or (warden.waiting.few or warden.waiting.none):
            quiet_since = now
        if end is not None and (not warden.children or now > end):
            break
        if end is None and now - quiet_since > QUIET_S:
            break
        await asyncio.sleep(STEP_S)
    await worker.drain()
    warden.close()
    return os.EX_OK if worker.failure is None else os.EX_SOFTWARE


async def _no_suspects(app: App, worker: EngineWorker, company: Company) -> None:
    """Returns once this child runs none and none waits. However long a suspect runs, it may."""
    from ackbone.services import suspects_of

    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S:
        await asyncio.sleep(0.2)
        try:
            waiting = await suspects_of(app, worker.worker)
            waits = waiting.few if company is Company.FEW else waiting.none
        except StoreError as error:
            log.warning("could not check for suspect messages: %s", error)
            waits = 1
        if waits or worker.running:
            quiet_since = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ackbone.supervisor")
    parser.add_argument("target")
    parser.add_argument("--company", type=Company, default=Company.ANY)
    parser.add_argument("--warden", action="store_true")
    parser.add_argument("--cautious", action="store_true")
    parser.add_argument("--parent", default=None)
    parser.add_argument("--until-idle", action="store_true")
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--log-level", default=None)
    parser.add_argument("--users-info", action="store_true")
    parser.add_argument("--report-fd", type=int, default=None)
    options = vars(parser.parse_args(arguments))
    report = StartReport(options.pop("report_fd"))
    from ackbone.observe.logs import configure_logs

    configure_logs(level=options["log_level"])
    try:
        code = asyncio.run(work(**options, report=report))
    except (ConfigError, AppNotLoaded) as error:
        if not report.is_heard:
            print(error, file=sys.stderr)  # noqa: T201
        report.refused(error)
        return os.EX_CONFIG if isinstance(error, ConfigError) else 1
    except AckboneError as error:
        report.failed(error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, StoreDenied | BrokerDenied):
            return os.EX_NOPERM
        away = isinstance(error, StoreUnavailable | BrokerUnavailable)
        return os.EX_UNAVAILABLE if away else 1
    except BaseException as error:  # the app's own: raised, or an exit, while it was loaded
        report.failed(error)
        raise
    _exit(code)


def _tune_interpreter() -> None:
    """It is our process.

    Fewer looks for garbage, and none at what was loaded: 4 % of a drain. The messages of a thousand
    slots are some 16,000 objects, none of them garbage: with a limit below that, all of them are
    looked through with every batch.

    Shorter turns at the interpreter's lock: the store's thread asks for it after each statement,
    and gets it 5 ms later while the loop is at work; the loop then has nothing left to do while the
    other statements run. A tenth of a drain from Redis.
    """
    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _give_way() -> NoReturn:
    """The loop is stuck for good. Nothing is flushed: whoever holds it may hold the streams."""
    os._exit(EXIT_RECYCLE)


def _exit(code: int) -> NoReturn:
    """End at once: a handler's thread must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
