"""The skeleton of an adapter in the guide fits the port, and is what the guide shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.typing import adapter_skeleton

if TYPE_CHECKING:
    from ackbone.brokers.registry import Adapter
    from ackbone.core.broker import Broker, Source

    def _port(broker: adapter_skeleton.SkeletonBroker) -> Broker:
        return broker

    def _source(source: adapter_skeleton.SkeletonSource) -> Source:
        return source

    def _registered() -> type[Adapter]:
        return adapter_skeleton.SkeletonBroker


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "adding-a-broker.md"


def test_the_guide_shows_the_skeleton_that_is_type_checked() -> None:
    code = Path(adapter_skeleton.__file__).read_text(encoding="utf-8").partition('"""\n\n')[2]
    shown = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert code.startswith("import asyncio\n")
    assert shown[0] == code
