"""The bundled agent that `ackbone dev` and `chat` run by default. It answers every message."""

from __future__ import annotations

from ackbone import App, Context

app = App(name="demo")


@app.on("*", timeout_s=60)
async def answer(ctx: Context) -> dict[str, str]:
    """Reply with the text of the message."""
    payload = ctx.payload
    text = payload.get("text") if isinstance(payload, dict) else payload
    reply = f"You said: {text}" if text else f"A {ctx.message.type} came in."
    await ctx.reply(reply)
    return {"reply": reply}
