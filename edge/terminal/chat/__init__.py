"""The chat in the terminal: its prompt, its commands, and how answers are shown."""
