"""The store: who may run what, and what became of it. One schema, hot SQL by dialect."""
