"""Channels: how replies reach Telegram, Slack, e-mail, a webhook, a folder or a terminal."""
