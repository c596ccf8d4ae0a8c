"""Rules in a file, on the real engine: they decide before each run, and may change meanwhile."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from ackbone import Context, Decision
from ackbone.app import App
from ackbone.composition.background import relays_of
from ackbone.config.rules_file import load_rules
from ackbone.core.errors import ConfigError
from ackbone.governance.rules import Rules, changes
from tests.integration.lab import Lab

FREEZE = {"name": "freeze", "match": {"tenant": "acme", "type": "pay*"}, "then": "deny"}


def write(lab: Lab, *rules: dict[str, Any], **document: Any) -> Path:
    """The rule file, exchanged at once as a careful person does."""
    file = lab.home / "rules.yaml"
    draft = lab.home / "rules.draft"
    draft.write_text(yaml.safe_dump({"rules": list(rules), **document}))
    return draft.rename(file)


async def governed(lab: Lab, *rules: dict[str, Any], **document: Any) -> tuple[App, list[str]]:
    """An app under rules, and the ids that its handler was given."""
    app = await lab.open(rules=write(lab, *rules, **document))
    ran: list[str] = []

    @app.on("*")
    async def run(ctx: Context) -> None:
        ran.append(ctx.message.id)

    return app, ran


async def test_the_first_rule_that_matches_decides(lab: Lab) -> None:
    app, ran = await governed(
        lab,
        {"name": "vip", "match": {"user": "boss"}, "then": "allow"},
        {**FREEZE, "reason": "no payouts for acme"},
    )
    await lab.start(app)
    await app.send("payout", id="no", tenant_id="acme")
    await app.send("payout", id="vip", tenant_id="acme", metadata={"user_id": "boss"})
    await app.send("payout", id="other", tenant_id="umbrella")
    assert await lab.ends("no", "vip", "other") == ["rejected", "succeeded", "succeeded"]
    assert sorted(ran) == ["other", "vip"]
    (data,) = [data for kind, data in lab.history("no") if kind == "task.rejected"]
    assert (data["reason"], data["policies"]) == ("no payouts for acme", ["freeze"])
    assert [letter["reason"] for letter in lab.letters()] == ["rejected"]


async def test_the_default_may_be_no(one_file: Lab) -> None:
    app, ran = await governed(
        one_file, {"name": "chat", "match": {"type": "chat"}, "then": "allow"}, default="deny"
    )
    await one_file.start(app)
    await app.send("chat", id="yes")
    await app.send("payout", id="no")
    assert await one_file.ends("yes", "no") == ["succeeded", "rejected"]
    assert ran == ["yes"]


async def test_rules_and_a_guard_must_both_say_yes(one_file: Lab) -> None:
    app, ran = await governed(one_file, FREEZE)
    asked: list[str] = []

    @app.guard
    async def guard(context: dict[str, Any]) -> Decision:
        asked.append(context["message_id"])
        assert context["payload"] == {"n": 1}
        return Decision(allowed=context["user"] != "eve", reason="no eves", policies=("mine",))

    await one_file.start(app)
    await app.send("payout", {"n": 1}, id="rules", tenant_id="acme")
    await app.send("payout", {"n": 1}, id="guard", metadata={"user_id": "eve"})
    await app.send("payout", {"n": 1}, id="both")
    assert await one_file.ends("rules", "guard", "both") == ["rejected", "rejected", "succeeded"]
    assert sorted(asked) == ["both", "guard"], "the rules are asked first"
    assert ran == ["both"]


async def test_a_broken_file_keeps_a_worker_from_starting(one_file: Lab) -> None:
    file = one_file.home / "rules.yaml"
    file.write_text("rules:\n  - {name: a, then: dney}\n")
    app = await one_file.open(rules=file)
    with pytest.raises(ConfigError, match="did you mean deny"):
        app.worker()
    file.unlink()
    app = await one_file.open(rules=file)
    with pytest.raises(ConfigError, match="there is no such rules file"):
        app.worker()
    await app.send("t", id="m")  # whoever only sends is not governed


async def test_a_changed_file_is_read_again(
    one_file: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    app, _ = await governed(one_file, FREEZE)
    await one_file.start(app, relays=relays_of(app, spawn_solo=False))
    await app.send("payout", id="m-1", tenant_id="acme")
    assert await one_file.ends("m-1") == ["rejected"]
    caplog.set_level(logging.WARNING, "ackbone.governance")
    began = asyncio.get_running_loop().time()
    write(one_file, {**FREEZE, "then": "allow"}, {"name": "new", "match": {}, "then": "deny"})
    await one_file.until(lambda: "have changed" in caplog.text)
    took = asyncio.get_running_loop().time() - began
    print(f"a changed file was in force after {took:.2f} s")
    assert took < 3 * 1.5, "promised within about a second; three times that is allowed here"
    assert "new is new (deny); freeze: action deny → allow" in caplog.text
    await app.send("payout", id="m-2", tenant_id="acme")
    await app.send("payout", id="m-3", tenant_id="umbrella")
    assert await one_file.ends("m-2", "m-3") == ["succeeded", "rejected"]


@pytest.mark.parametrize("fault", ["broken", "empty", "gone"])
async def test_a_broken_change_is_refused_and_the_rules_stay(
    one_file: Lab, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    app, _ = await governed(one_file, FREEZE)
    worker = await one_file.start(app)
    file = one_file.home / "rules.yaml"
    rules = app.rule_file
    assert rules is not None
    caplog.set_level(logging.WARNING, "ackbone.governance")
    match fault:
        case "broken":
            file.write_text("rules:\n  - {name: freeze, then: [deny}\n")
        case "empty":
            file.write_text("")
        case "gone":
            file.unlink()
    for _ in range(4):
        assert not await rules.step()
    assert caplog.text.count("the old ones stay in force") == 1, "said once"
    assert "rules.yaml" in caplog.text
    await app.send("payout", id="m-1", tenant_id="acme")
    assert await one_file.ends("m-1") == ["rejected"]
    write(one_file, {**FREEZE, "then": "allow"})
    assert [await rules.step(), await rules.step(), await rules.step()] == [False, True, False]
    await app.send("payout", id="m-2", tenant_id="acme")
    assert await one_file.ends("m-2") == ["succeeded"]
    await one_file.stop(worker)


async def test_half_a_file_is_not_read(one_file: Lab) -> None:
    """Whoever writes it slowly leaves good rules on the way: fewer of them."""
    await governed(one_file, FREEZE)
    file = one_file.home / "rules.yaml"
    app = await one_file.open(rules=file)
    rules = app.rule_file
    assert rules is not None
    file.write_text("rules: []\n#")
    assert not await rules.step()
    with file.open("a") as out:
        out.write("\n# still writing\n")
    assert not await rules.step()
    write(one_file, FREEZE, {"name": "more", "match": {"type": "x"}, "then": "deny"})
    assert [await rules.step(), await rules.step()] == [False, True]
    assert [rule.name for rule in rules.book.rules.rules] == ["freeze", "more"]


def test_changes_are_told_in_words(one_file: Lab) -> None:
    quota = {"name": "cap", "then": "quota", "window": "hour", "match": {}, "limits": {"runs": 2}}
    before = load_rules(write(one_file, FREEZE, quota))
    other = {**FREEZE, "match": {"tenant": "acme", "payload": "n > 1"}, "reason": "why"}
    limits = {"runs": 5, "cost": 1.5}
    after = load_rules(write(one_file, {**quota, "limits": limits}, other, default="deny"))
    assert changes(before, after) == [
        "cap: quota 2 runs in 3600 s → 5 runs, 1.5 cost in 3600 s",
        "freeze: match of type, payload changed, reason  → why",
        "the order has changed",
        "default: allow → deny",
    ]
    assert changes(after, after) == []
    assert changes(Rules(), before) == ["freeze is new (deny)", "cap is new (quota)"]
    assert changes(before, Rules()) == ["freeze is gone (deny)", "cap is gone (quota)"]


async def test_rules_that_raise_never_mean_allow(
    one_file: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ran = await governed(one_file, FREEZE)
    assert app.rule_file is not None

    def broken(context: object) -> None:
        raise RuntimeError("cannot decide")

    monkeypatch.setattr(app.rule_file.book, "decision", broken)
    await one_file.start(app)
    await app.send("chat", id="m-1")
    assert await one_file.ends("m-1") == ["failed"]
    assert ran == []
    assert one_file.kinds("m-1").count("task.retried") == 3
    assert [letter["reason"] for letter in one_file.letters()] == ["retries_exhausted"]
