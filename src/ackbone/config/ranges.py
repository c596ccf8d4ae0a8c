"""Numbers that a setting may have."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

YEAR = 31_536_000
Time = Annotated[float, Meta(ge=0, le=YEAR)]
Span = Annotated[float, Meta(gt=0, le=YEAR)]
Days = Annotated[float, Meta(gt=0, le=36_500)]
Retries = Annotated[int, Meta(ge=0, le=1_000_000)]
Factor = Annotated[float, Meta(ge=1, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
AckPolicy = Literal["ack", "nack", "requeue", "dlq"]
