"""Mistakes in the user's program are told where they are made, with what was meant."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ackbone import App, Config, ConfigError, Context
from ackbone.brokers.memory import MemoryBroker
from ackbone.core.errors import InvalidMessage
from ackbone.core.text import unknown_option
from ackbone.engine.sender import Sender, SendPolicy


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(Config(home=tmp_path))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("delay", "delay_s"),
        ("delay_seconds", "delay_s"),
        ("ttl", "ttl_s"),
        ("order_key", "ordering_key"),
        ("idempotencykey", "idempotency_key"),
        ("tenant", "tenant_id"),
        ("header", "headers"),
    ],
)
def test_an_option_of_send_that_is_nearly_right_is_named(wrong: str, right: str) -> None:
    sender = Sender(
        lambda queue: SendPolicy(), lambda queue: MemoryBroker(), max_bytes=1000, timeout_s=1
    )
    with pytest.raises(InvalidMessage, match=f"unknown option {wrong!r}; did you mean {right!r}"):
        sender.outgoing("t", None, "q", {wrong: 5})


def test_an_option_that_is_nothing_like_one_gets_them_all() -> None:
    said = unknown_option("zzz", ("b", "a"))
    assert said == "unknown option 'zzz'; the options are a, b"


def test_an_option_of_on_that_is_nearly_right_is_named(app: App) -> None:
    on: Any = app.on
    with pytest.raises(TypeError, match=r"app\.on: unknown option 'timeout'; did you mean 'tim"):
        on("t", timeout=5)
    with pytest.raises(TypeError, match="did you mean 'retry' or 'retries'"):
        on("t", retrys=5)


def test_on_without_a_type_is_told(app: App) -> None:
    on: Any = app.on
    with pytest.raises(TypeError, match=r'write @app\.on\("type"\)'):

        @on
        async def handler(ctx: Context) -> None: ...


async def no_ctx() -> None: ...


async def two(ctx: Context, order: dict[str, Any]) -> None: ...


def keyword(*, ctx: Context) -> None: ...


@pytest.mark.parametrize("wrong", [no_ctx, two, keyword, lambda: None])
def test_a_handler_that_takes_no_context_is_refused(app: App, wrong: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="called with one argument, the context") as refused:
        app.on("order")(wrong)
    line = wrong.__code__.co_firstlineno
    assert f"{__file__}:{line}: {wrong.__qualname__}(" in str(refused.value)
    assert app.handlers.queues == []


class Agent:
    async def method(self, ctx: Context) -> None: ...

    def __call__(self, ctx: Context, extra: int = 0) -> None: ...


@dataclass
class Unhashable:
    name: str = "agent"

    async def __call__(self, ctx: Context) -> None: ...


def rest(*args: Any) -> None: ...


@functools.wraps(two)
async def fills_in(ctx: Context) -> None:
    await two(ctx, {})


@pytest.mark.parametrize(
    "fine",
    [
        Agent().method,
        Agent(),
        Unhashable(),
        rest,
        functools.partial(two, order={}),
        fills_in,
        lambda message: None,
        print,
    ],
)
def test_whatever_takes_a_context_is_a_handler(app: App, fine: Callable[..., Any]) -> None:
    app.on("order")(fine)
    assert app.handlers.types("default") == ["order"]


def test_an_object_that_cannot_be_hashed_is_known_by_its_call(app: App) -> None:
    app.on("order")(Unhashable())
    (handler,) = app.handlers
    assert handler.is_async


def test_what_cannot_be_called_is_refused(app: App) -> None:
    on: Any = app.on("order")
    with pytest.raises(ConfigError, match="the handler for 'order' is not a function"):
        on(5)
