"""The end-to-end sample of the queue trigger specification, as it is printed there."""

import asyncio
from datetime import datetime

import pytest

from ackbone import MockQueueAdapter, QueueTrigger, QueueTriggerConfig, RawMessage
from ackbone.testing import (
    MockAgentRuntime,
    MockGovernanceLayer,
    MockIdempotencyStore,
    MockLedger,
)


@pytest.mark.asyncio
async def test_end_to_end_message_processing():
    """From the queue's message to the agent's run."""
    mock_adapter = MockQueueAdapter()
    mock_runtime = MockAgentRuntime()
    mock_governance = MockGovernanceLayer()
    mock_ledger = MockLedger()
    mock_store = MockIdempotencyStore()

    config = QueueTriggerConfig(
        queue_name="test-queue",
        consumer_group="test-group",
        concurrency=1,
    )

    trigger = QueueTrigger(
        config=config,
        adapter=mock_adapter,
        agent_runtime=mock_runtime,
        governance=mock_governance,
        ledger=mock_ledger,
        idempotency_store=mock_store,
    )

    test_message = RawMessage(
        message_id="test-001",
        body=b'{"action": "test"}',
        headers={"x-event-name": "test_event"},
        timestamp=datetime.now(),  # noqa: DTZ005 - as printed
        metadata={},
    )
    mock_adapter.enqueue(test_message)

    await trigger.start()

    await asyncio.sleep(0.5)

    await trigger.stop()

    assert "test-001" in mock_adapter.get_acked()
    assert len(mock_runtime.get_triggered_events()) == 1
    assert len(mock_ledger.get_records()) == 1
