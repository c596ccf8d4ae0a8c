"""What a user's editor infers: checked by mypy, run only to see that the names exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from ackbone import App, Context, Receipt, RetryPolicy, SyncContext
from ackbone.core.outcome import Dead, Retry
from ackbone.core.retry import decide

if TYPE_CHECKING:

    async def _sending(app: App) -> None:
        assert_type(await app.send("greeting", {"name": "Ada"}), Receipt)
        assert_type((await app.send("greeting")).id, str)
        assert_type(app.send_sync("greeting"), Receipt)

    async def _handling(ctx: Context) -> None:
        assert_type(ctx.attempt, int)
        assert_type(ctx.idempotency_key, str)
        assert_type(await ctx.reply("hello"), None)
        assert_type(await ctx.send("next", {}), str)
        assert_type(await ctx.once("charge", lambda key: key), Any)

    def _plainly(ctx: SyncContext) -> None:
        assert_type(ctx.reply("hello"), None)
        assert_type(ctx.send("next", {}), str)

    def _registering(app: App) -> None:
        @app.on("greeting")
        async def greet(ctx: Context) -> int:
            return ctx.attempt

        async def _call(ctx: Context) -> None:
            assert_type(await greet(ctx), int)  # the decorator leaves the function as it is

    def _deciding(policy: RetryPolicy, error: Exception) -> None:
        assert_type(decide(policy, failures=1, error=error), Retry | Dead)


def test_the_names_exist_at_run_time() -> None:
    assert {App, Context, Receipt, RetryPolicy, SyncContext} == {
        getattr(__import__("ackbone"), name)
        for name in ("App", "Context", "Receipt", "RetryPolicy", "SyncContext")
    }
