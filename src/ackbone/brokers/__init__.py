"""Transports: one class each over `core.broker.Broker`; `registry` finds them by URL scheme."""
