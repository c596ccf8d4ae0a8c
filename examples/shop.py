"""An agent that acts on the outside world: it charges a card once, whatever is killed meanwhile.

Run it:     ackbone run examples/shop.py:app
Try it:     ackbone send --type order --payload '{"customer": "ada", "amount": 42}'
Kill it:    add "think_s": 10 to the payload, and kill -9 the worker while it thinks. The order
            is taken up again, the card is not charged again: `charges.log` has one line for it.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from ackbone import App, Context, SyncContext, ValidationError

app = App(name="shop")

CHARGES = Path(os.environ.get("SHOP_CHARGES", "charges.log"))


def charge_card(key: str, customer: str, amount: int) -> dict[str, str]:
    """The payment service, played by a file. A real one takes `key` as its idempotency key."""
    with CHARGES.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"key": key, "customer": customer, "amount": amount}) + "\n")
    return {"charge": key}


@app.on("order", retries=3, timeout_s=60)
async def take_order(ctx: Context) -> dict[str, str]:
    """Charge, think, then hand over to packing and answer: the last two with the commit alone."""
    order = ctx.payload
    if not isinstance(order, dict) or not isinstance(order.get("amount"), int):
        raise ValidationError("an order needs an amount, a whole number")
    customer, amount = str(order.get("customer", "someone")), order["amount"]
    paid = await ctx.once("charge", lambda key: charge_card(key, customer, amount))
    await asyncio.sleep(order.get("think_s", 0.1))
    await ctx.send("parcel", {"customer": customer, **paid}, queue="packing")
    await ctx.reply(f"Thank you, {customer}: {amount} was charged, a parcel is on its way.")
    return {"charge": paid["charge"]}


@app.on("parcel", queue="packing")
def pack(ctx: SyncContext) -> str:
    """A plain function: it runs in a thread."""
    return f"packed for {ctx.payload['customer']}"
