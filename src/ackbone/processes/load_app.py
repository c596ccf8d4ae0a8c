"""Find the app of a command: `module:attribute` or `path/to/file.py:attribute`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ackbone.core.errors import AckboneError, AppNotLoaded, ConfigError
from ackbone.core.retry import describe

if TYPE_CHECKING:
    from ackbone.app import App


def load_app(target: str) -> App:
    """Import the module of `target` and return its app. Without an attribute it is called `app`.

    Raises AppNotLoaded if the code of the module fails, and ConfigError if there is no App or if
    its own configuration contradicts the command's.
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
    """Refuse an app whose own configuration differs from what the command or the environment names.
    Other commands would look into another database than the workers."""
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
    """Return where the error was raised, without the frames of the import system and of ackbone."""
    ours = str(Path(__file__).parents[1])
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", ours))
        and Path(frame.filename).parent.name != "importlib"
    ]
