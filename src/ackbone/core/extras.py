"""How to install an optional dependency of the package (an "extra")."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """Return the words of an error message that tell the user how to install an extra.

    The package is not on an index yet, so `pip install 'ackbone[redis]'` would find nothing.
    """
    return f"install the extra {extra!r}; in a clone of ackbone: pip install -e '.[{extra}]'"
