"""A new user's machine: an empty environment with our wheel in it, and a shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import distribution, requires
from pathlib import Path

from tests.faults.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def build_wheel(to: Path) -> Path:
    """The wheel of this checkout, by the hatchling of the development environment: no network."""
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _pip(*command, "--wheel-dir", str(to), str(ROOT))
    (wheel,) = to.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> None:
    """A virtual environment with the wheel, what it requires, and nothing else.

    Its dependencies are links into the development environment, which saves downloading them.
    Only those that the wheel declares are linked, so a missing declaration is an ImportError here.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in sorted(_required("ackbone")):
        for file in distribution(name).files or ():
            top = Path(file.parts[0])
            target = Path(str(distribution(name).locate_file(top)))
            if top.name not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(target)
    _pip("--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps", str(wheel))


def _required(name: str) -> set[str]:
    """The distributions that one needs without any extras, and theirs in turn."""
    found: set[str] = set()
    left = [name]
    while left:
        for line in requires(left.pop()) or ():
            text, _, marker = line.partition(";")
            match = _NAME.match(text)
            if match is None or "extra ==" in marker or match[0] in found:
                continue
            if _is_installed(match[0]):  # else it is for another platform or an older Python
                found.add(match[0])
                left.append(match[0])
    return found


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except ModuleNotFoundError:
        return False
    return True


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Machine:
    """A folder with `.venv` in it, as after a setup, and a shell in that folder."""

    def __init__(self, environment: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ab-", dir="/tmp"))
        (self.folder / ".venv").symlink_to(environment)
        path = f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        self._environ = {"PATH": path, "HOME": str(self.folder), "LANG": "C.UTF-8"}
        self._service: subprocess.Popen[bytes] | None = None

    def run(self, command: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command line, to its end."""
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}{self.log()}"
        return done

    def start(self, command: str, *, until: str) -> None:
        """A command line that goes on in another terminal, instead of the one before it."""
        self.stop()
        with (self.folder / "service.log").open("wb") as log:
            self._service = subprocess.Popen(
                ["/bin/bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.shows(until)

    def shows(self, text: str) -> None:
        """Wait until the other terminal shows it."""
        service = self._service
        assert service is not None
        wait_until(lambda: text in self.log() or service.poll() is not None, text)
        assert text in self.log(), self.log()

    def log(self) -> str:
        file = self.folder / "service.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def stop(self) -> None:
        """Press Ctrl+C in the other terminal."""
        service, self._service = self._service, None
        if service is not None and service.poll() is None:
            os.killpg(service.pid, signal.SIGINT)
            assert service.wait(PATIENCE_S) == 0, self.log()

    def remove(self) -> None:
        if self._service is not None and self._service.poll() is None:
            os.killpg(self._service.pid, signal.SIGKILL)
            self._service.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def commands(page: str) -> Iterator[str]:
    """The command lines of a page's console blocks, in their order."""
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
