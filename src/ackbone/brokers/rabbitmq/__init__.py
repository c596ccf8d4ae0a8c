"""RabbitMQ as a broker. Importing this package requires the extra `rabbitmq`."""

from .broker import RabbitBroker

__all__ = ["RabbitBroker"]
