"""What is shown in a terminal: answers, tables, progress, the chat."""
