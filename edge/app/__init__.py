"""The chat app: a page in the browser, and the local server behind it."""
