"""The meaning of an HTTP answer for a reply: it arrived, has to wait, or never will arrive."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

from ackbone.core.errors import FinalError, RateLimited, RetryableError, SendUnknown, TemporaryError
from ackbone.core.text import one_line
from ackbone.delivery.backoff import LONGEST_WAIT_S

_TRY_AGAIN = frozenset({408, 421, 425})
IN_DOUBT = frozenset({502, 504, 520, 522, 524})
"""Answers of a gateway that passed the request on and got no good answer."""
TOO_MANY = 429
_SHOWN = 300


def check_answer(status: int, headers: Mapping[str, str], text: str) -> None:
    """Return if the reply arrived; raise RateLimited, SendUnknown, TemporaryError or FinalError."""
    if 200 <= status < 300:
        return
    said = f"HTTP {status}" + (f": {text}" if text else "")
    wait_s = retry_after_s(headers)
    if status == TOO_MANY:
        raise RateLimited(said, retry_after_s=wait_s)
    if status in IN_DOUBT:
        raise SendUnknown(said, retry_after_s=wait_s)
    if status >= 500 or status in _TRY_AGAIN:
        raise TemporaryError(said, retry_after_s=wait_s)
    if 300 <= status < 400:
        raise FinalError(f"{said}: redirects are not followed")
    if status == 410:
        raise FinalError(f"{said}: the receiver wants no more requests")
    raise FinalError(said)


def not_theirs(who: str, status: int, headers: Mapping[str, str], text: str) -> RetryableError:
    """Return the error for an answer that does not have the service's form.

    It comes from a proxy in between, so it is never final.
    """
    said = f"{who}: HTTP {status}, and not in {who}'s own form: {text}"
    wait_s = retry_after_s(headers)
    if 200 <= status < 300 or status in IN_DOUBT:
        return SendUnknown(said, retry_after_s=wait_s)
    if status == TOO_MANY:
        return RateLimited(said, retry_after_s=wait_s)
    return TemporaryError(said, retry_after_s=wait_s)


def shown(text: str) -> str:
    """Return text of another program as one short line for an error message."""
    return one_line(text).strip()[:_SHOWN]


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, a number or a date; None if it cannot be read."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    try:
        wait_s = float(text)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(wait_s) else min(LONGEST_WAIT_S, max(0.0, wait_s))
