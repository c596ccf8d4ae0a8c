"""Channels that carry replies out. `terminal.py`: the one that needs nobody."""
