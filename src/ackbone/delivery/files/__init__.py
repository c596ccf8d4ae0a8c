"""Deliveries as files in a folder, for programs without an `App`: the queue and its runner."""
