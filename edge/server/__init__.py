"""The OpenAI-compatible HTTP server: an ASGI application, and the process that serves it."""
