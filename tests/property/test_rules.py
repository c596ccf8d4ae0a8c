"""Rules decide about everything, in order, and nothing that is broken ever means allow."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ackbone.config.rules_file import load_rules
from ackbone.core.errors import ConfigError
from ackbone.governance.expression import MISSING
from ackbone.governance.rulebook import RuleBook
from ackbone.governance.rules import Action, Facts, Rules, decide, fits, quotas_for

NAMES = ["acme", "umbrella", "a*", "*", "?cme", "payout", "chat"]
CONDITIONS = ["amount > 5", "kind == 'x'", "exists(amount)", "not amount <= 5 or kind != 'y'"]

_match = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.sampled_from(NAMES) | st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
        "type": st.sampled_from(NAMES),
        "user": st.sampled_from(NAMES),
        "priority": st.sampled_from([0, 1, "high", ">= 2", "< normal", [0, 3]]),
        "attempt": st.sampled_from([1, "> 1", [2, 3]]),
        "payload": st.sampled_from(CONDITIONS),
    },
)
_deciding = st.fixed_dictionaries(
    {"then": st.sampled_from(["allow", "deny", "approve"]), "match": _match}
)
_counting = st.fixed_dictionaries(
    {
        "then": st.just("quota"),
        "match": _match,
        "window": st.sampled_from(["minute", "hour", "day", 5]),
        "limits": st.just({"runs": 3}),
    }
)


def _named(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names for all, and nothing below what decides about everything."""
    kept = []
    for number, entry in enumerate(entries):
        kept.append({"name": f"rule-{number}", **entry})
        if entry["then"] != "quota" and not entry["match"]:
            break
    return kept


_documents = st.fixed_dictionaries(
    {"rules": st.lists(_deciding | _counting, max_size=6).map(_named)},
    optional={"default": st.sampled_from(["allow", "deny"])},
)
_facts = st.builds(
    Facts,
    tenant=st.sampled_from(["acme", "umbrella", "zeta"]) | st.just(MISSING),
    queue=st.just("default"),
    type=st.sampled_from(["payout", "chat"]) | st.just(MISSING),
    channel=st.just(""),
    user=st.sampled_from(["", "acme"]) | st.just(MISSING),
    priority=st.integers(0, 3) | st.just(MISSING),
    attempt=st.integers(1, 4),
    payload=st.sampled_from(
        [{"amount": 9}, {"amount": "9"}, {"kind": "x"}, {}, None, "text", {"amount": 1, "kind": 1}]
    )
    | st.just(MISSING),
)
on_a_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(folder: Path, document: Any) -> Rules:
    file = folder / "rules.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return load_rules(file, environ={})


@on_a_file
@given(document=_documents, facts=_facts)
def test_total_and_in_order(tmp_path: Path, document: Any, facts: Facts) -> None:
    rules = read(tmp_path, document)
    ruling = decide(rules, facts)
    assert ruling.action in (Action.ALLOW, Action.DENY, Action.APPROVE)
    assert ruling == decide(rules, facts), "the same question has the same answer"
    deciding = [rule for rule in rules.rules if rule.action is not Action.QUOTA]
    fitting = [rule for rule in deciding if rule.applies(facts)]
    if fitting:
        assert ruling.rule is fitting[0], "the first one that matches decides"
        assert ruling.action is fitting[0].action
    else:
        assert ruling.rule is None
        assert ruling.action is rules.default
    quotas = quotas_for(rules, facts)
    assert [quota.name for quota in quotas] == [
        rule.name for rule in rules.rules if rule.action is Action.QUOTA and rule.applies(facts)
    ], "all that match count"


@on_a_file
@given(document=_documents, facts=_facts)
def test_the_unknown_counts_against_the_message(
    tmp_path: Path, document: Any, facts: Facts
) -> None:
    rules = read(tmp_path, document)
    ruling = decide(rules, facts)
    if ruling.action is Action.ALLOW and ruling.rule is not None:
        assert ruling.rule.matches(facts) is True
        above = rules.rules[: rules.rules.index(ruling.rule)]
    elif ruling.action is Action.ALLOW:
        above = rules.rules
    else:
        return
    for rule in above:
        if rule.action in (Action.DENY, Action.APPROVE):
            assert rule.matches(facts) is False, "allowed past a rule that may well match"


@on_a_file
@given(document=_documents, facts=_facts, data=st.data())
def test_a_yes_passes_exactly_its_rule(
    tmp_path: Path, document: Any, facts: Facts, data: st.DataObject
) -> None:
    rules = read(tmp_path, document)
    names = [rule.name for rule in rules.rules]
    approved = set(data.draw(st.lists(st.sampled_from(names)))) if names else set()
    before, after = decide(rules, facts), decide(rules, facts, approved=approved)
    if before.rule is None or before.action is not Action.APPROVE:
        assert after == before, "a yes to a rule that does not ask changes nothing"
    elif before.rule.name not in approved:
        assert after == before
    else:
        assert before.rule.name in after.passed
        if after.rule is not None:
            below = rules.rules.index(after.rule) > rules.rules.index(before.rule)
            assert below, "the rules below it are still asked"
        else:
            assert after.action is Action.ALLOW


@on_a_file
@given(document=_documents, data=st.data())
def test_a_broken_file_never_means_allow(
    tmp_path: Path, document: Any, data: st.DataObject
) -> None:
    """A file that somebody mistyped, emptied or half wrote is refused."""
    read(tmp_path, document)  # as it was, it is good
    kind = data.draw(st.sampled_from(["typo", "key", "value", "empty"]))
    if kind == "empty":
        broken = data.draw(
            st.sampled_from(["", "# nothing\n", "default: allow\n", "rules:\n", "[]"])
        )
    elif not document["rules"]:
        return
    else:
        number = data.draw(st.integers(0, len(document["rules"]) - 1))
        entries = [dict(each) for each in document["rules"]]
        entry = entries[number]
        if kind == "typo":
            entry["then"] = data.draw(st.sampled_from(["dney", "", None, 5, ["deny"], "yes"]))
        elif kind == "key":
            entry["mach"] = entry.pop("match")
        else:
            field = data.draw(st.sampled_from(["tenant", "type", "payload", "priority"]))
            entry["match"] = {**entry["match"], field: data.draw(st.sampled_from([None, [], {}]))}
        broken = yaml.safe_dump({**document, "rules": entries})
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, broken)
    assert all("rules.yaml" in problem for problem in caught.value.problems)


@given(st.text(max_size=300))
def test_any_text_is_refused_or_says_rules(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            rules = load_rules(file, environ={})
        except ConfigError:
            return
        assert "rules" in text
        assert isinstance(rules, Rules)


@given(
    st.text(alphabet="ab*?", max_size=8),
    st.text(alphabet="ab", max_size=12),
)
def test_globs(glob: str, text: str) -> None:
    pattern = re.escape(glob).replace(r"\*", ".*").replace(r"\?", ".")
    assert fits(glob, text) == (re.fullmatch(pattern, text, re.DOTALL) is not None)


def test_no_text_makes_a_glob_slow() -> None:
    assert not fits("*a" * 30 + "b", "a" * 20_000)


async def test_a_guard_that_is_told_little_says_no_rather_than_yes(tmp_path: Path) -> None:
    """The governance port of queue triggers knows neither type nor payload."""
    book = RuleBook(
        read(
            tmp_path,
            {
                "rules": [
                    {"name": "safe", "then": "allow", "match": {"type": "chat"}},
                    {"name": "big", "then": "deny", "match": {"payload": "amount > 5"}},
                ]
            },
        )
    )
    said = await book.check_permission({"queue": "q", "message_id": "m", "tenant_id": "t"})
    assert not said.allowed
    assert said.policies == ("big",)
    assert "cannot be evaluated" in said.reason
