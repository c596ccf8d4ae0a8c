"""One worker process: `python -m ackbone.processes.worker_process MODULE:APP`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ackbone.core.errors import (
    AckboneError,
    AppNotLoaded,
    BrokerDenied,
    BrokerUnavailable,
    ConfigError,
    StoreDenied,
    StoreUnavailable,
)
from ackbone.core.store import Company

from .load_app import load_app
from .start_report import StartReport
from .suspects import QUIET_S, STEP_S, Warden, no_suspects
from .worker_place import EXIT_RECYCLE

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.engine.worker import EngineWorker

log = logging.getLogger("ackbone.worker")

TURN_S = 0.001
"""How long a thread keeps the interpreter's lock while another one waits for it."""


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
    """Run one worker process. `terminal`: it prints the replies of the terminal channel."""
    from ackbone.composition.background import relays_of
    from ackbone.composition.idle import idle
    from ackbone.observe.logs import configure_logs, identify

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
            options = [] if log_level is None else ["--log-level", log_level]
            return await _run_warden(app, Warden(app, target, options), report, parent, stop)
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
            over = no_suspects(app, worker, company) if child else idle(app, worker)
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
            # Threads, and coroutines that ignore their cancellation. Their messages are handed back
            # when this process is gone, so it must not wait for them.
            _exit(code)
    return code


async def _run_warden(
    app: App, warden: Warden, report: StartReport, parent: str | None, stop: asyncio.Event
) -> int:
    """Look after the child processes of suspects while there are any."""
    from ackbone.engine.relays import Relay
    from ackbone.observe.logs import identify

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


async def _begins(worker: EngineWorker, stop: asyncio.Event) -> bool:
    """Start the worker. Returns False if it was told to stop while it waited for the store."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ackbone.processes.worker_process")
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
    except BaseException as error:  # the app raised it, or exited, while it was loaded
        report.failed(error)
        raise
    _exit(code)


def _tune_interpreter() -> None:
    """Set up the garbage collector and the interpreter's lock of this process.

    Collect less often, and leave out what was loaded at the start: saves 4 % of a drain. The
    messages of a thousand slots are some 16,000 objects, none of them garbage. With a limit below
    that, every batch would be searched for garbage.

    Take shorter turns at the interpreter's lock: saves a tenth of a drain from Redis. The store's
    thread asks for the lock after each statement and would get it 5 ms later while the loop works.
    The loop would then have nothing to do while the other statements run.
    """
    sys.setswitchinterval(TURN_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _give_way() -> NoReturn:
    """End the process because the loop is stuck for good. Flushes nothing: the handler that blocks
    the loop may hold the locks of the streams."""
    os._exit(EXIT_RECYCLE)


def _exit(code: int) -> NoReturn:
    """End at once, without waiting for the threads of handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
