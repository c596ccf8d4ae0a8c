"""One way from a user's value to JSON: results, payloads and replies take the same ones."""

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from ackbone.brokers.memory import MemoryBroker
from ackbone.core.broker import Delivery, Subscription
from ackbone.core.codecs.codec import CODECS
from ackbone.core.codecs.values import dumps, is_model, result_bytes
from ackbone.core.errors import InvalidMessage, InvalidResult
from ackbone.core.message import Message
from ackbone.engine.sender import Sender, SendPolicy


@dataclasses.dataclass
class Order:
    id: int
    tags: list[str]


class Parcel(msgspec.Struct):
    order: Order
    weight: float = 1.5


class Triage:
    """Has the one method of a pydantic model that counts."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, *, mode: str = "python") -> dict[str, Any]:
        assert mode == "json"
        return dict(self._fields)


MODELS = [
    (Order(1, ["a"]), {"id": 1, "tags": ["a"]}),
    (Parcel(Order(2, [])), {"order": {"id": 2, "tags": []}, "weight": 1.5}),
    (Triage(label="spam", score=0.5), {"label": "spam", "score": 0.5}),
]
NESTED = [({"found": [model]}, {"found": [plain]}) for model, plain in MODELS]


@pytest.mark.parametrize(("value", "plain"), [*MODELS, *NESTED])
def test_models_become_objects(value: Any, plain: Any) -> None:
    written = result_bytes(value)
    assert written is not None
    assert msgspec.json.decode(written) == plain


@pytest.mark.parametrize("codec", ["standard", "task", "json"])
@pytest.mark.parametrize("options", [{}, {"priority": 2}])
@pytest.mark.parametrize(("value", "plain"), MODELS)
def test_models_are_payloads_in_every_form(
    codec: str, options: dict[str, Any], value: Any, plain: Any
) -> None:
    sender = Sender(
        lambda queue: SendPolicy(codec=codec),
        lambda queue: MemoryBroker(),
        max_bytes=10_000,
        timeout_s=1,
    )
    sender.outgoing("warm", {}, "q", {"priority": 1})  # a queue that is known takes a short cut
    outgoing = sender.outgoing("order", value, "q", options).outgoing
    copy = Delivery(body=outgoing.body, headers=outgoing.headers, tag=None, identity=outgoing.id)
    assert CODECS[codec].decode(copy, Subscription(name="q", queue="q")).payload == plain


class Opaque:
    pass


@pytest.mark.parametrize("value", [Opaque(), {"deep": [Opaque()]}, Opaque, 1j])
def test_other_values_are_refused_with_their_type(value: Any) -> None:
    with pytest.raises(InvalidResult, match=f"returned a {type(value).__name__}, but") as refused:
        result_bytes(value)
    assert "a dataclass, a msgspec struct or a pydantic model" in str(refused.value)
    with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
        dumps(value)


def test_the_refused_type_inside_a_value_is_named() -> None:
    with pytest.raises(InvalidMessage, match=r"test_to_json\.Opaque is not a JSON value"):
        dumps({"deep": [Opaque()]})


@pytest.mark.parametrize("hide", [lambda x: Triage(score=x), lambda x: [Triage(score=[x])]])
def test_a_model_cannot_hide_a_number_that_json_lacks(hide: Any) -> None:
    with pytest.raises(InvalidMessage, match="NaN"):
        dumps(hide(math.nan))


def test_none_stays_none_and_classes_are_no_models() -> None:
    assert result_bytes(None) is None
    assert not any(map(is_model, (Order, Parcel, Triage, {}, "text", 1, None)))


def test_a_message_with_a_refused_payload_is_not_accepted() -> None:
    with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
        CODECS["standard"].encode(Message(type="order", payload=Opaque()))
