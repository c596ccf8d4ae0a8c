"""A certificate authority of a test's own, and what it signs: a server for localhost, a client."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Its files lie in `folder`: `ca.crt`, and `NAME.crt` with `NAME.key` for each one signed."""

    def __init__(self, folder: Path, name: str = "ackbone tests") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.certificate = folder / "ca.crt"
        self._key = folder / "ca.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate,
            "-days", "2", "-subj", f"/CN={name}",
        )  # fmt: skip

    def sign(self, name: str) -> tuple[Path, Path]:
        """A new certificate, good for localhost, and its key."""
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        request, more = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        more.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
            "-CAcreateserial", "-out", certificate, "-days", "2", "-extfile", more,
        )  # fmt: skip
        return certificate, key


def _openssl(*arguments: object) -> None:
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
