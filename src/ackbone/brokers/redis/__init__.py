"""Redis Streams: a stream per queue, a consumer group per subscription."""

from .broker import RedisBroker

__all__ = ["RedisBroker"]
