"""The bundled example agent: answers offline, keeps its promise like any other.

Try it: `make run`, then in another terminal `ackbone send --type chat --payload '{"text": "hi"}'`.
"""

from __future__ import annotations

import asyncio

from ackbone import App, Context

app = App(name="echo")


@app.on("chat", retries=3, timeout_s=60)
async def answer(ctx: Context) -> dict[str, str]:
    """Think for a moment, then answer where the message came from."""
    text = str(ctx.payload.get("text", "")) if isinstance(ctx.payload, dict) else str(ctx.payload)
    await asyncio.sleep(0.2)
    reply = f"You said: {text}" if text else "I am here."
    ctx.usage(llm_calls=1, tokens=len(reply.split()))
    await ctx.reply(reply)
    return {"reply": reply}
