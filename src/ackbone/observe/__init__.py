"""Metrics and logs: what people and machines see of a running worker."""
