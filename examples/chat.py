"""An ordered chat: messages of one conversation run one after the other, those of others beside it.

Run it:     ackbone run examples/chat.py:app --workers 2
Try it:     for n in 1 2 3; do
              ackbone send --type said --ordering-key ada --payload "{\"text\": \"$n\"}"
            done

A message with a question mark fails at first, as if the model were busy. Its conversation waits for
its retry; the other conversations do not.
"""

from __future__ import annotations

import asyncio
import random

from ackbone import App, Context, RetryPolicy, TemporaryError

app = App(name="chat")


@app.on("said", retry=RetryPolicy(max_retries=5, base_delay=0.2))
async def answer(ctx: Context) -> str:
    text = str(ctx.payload["text"])
    await asyncio.sleep(random.uniform(0, 0.05))
    if "?" in text and ctx.retry_count == 0:
        raise TemporaryError("the model is busy", retry_after_s=0.1)
    await ctx.reply(f"{ctx.message.ordering_key}: {text}")
    return text
