"""The agent that `ackbone dev` runs when it is given none: it answers whatever it gets."""

from __future__ import annotations

from ackbone import App, Context

app = App(name="demo")


@app.on("*", timeout_s=60)
async def answer(ctx: Context) -> dict[str, str]:
    """Say back what came, where it came from."""
    payload = ctx.payload
    text = payload.get("text") if isinstance(payload, dict) else payload
    reply = f"You said: {text}" if text else f"A {ctx.message.type} came in."
    await ctx.reply(reply)
    return {"reply": reply}
