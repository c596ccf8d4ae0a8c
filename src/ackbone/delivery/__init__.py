"""Channels that carry replies out, one in each `*_channel.py`. `terminal.py` needs nobody."""
