"""Conversations that the app and the terminal chat keep: trees of messages in SQLite."""
