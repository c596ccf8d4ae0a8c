"""Metrics and logs of a running process."""
