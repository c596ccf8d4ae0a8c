"""The broker in the store's own PostgreSQL database."""

from .broker import PostgresBroker

__all__ = ["PostgresBroker"]
