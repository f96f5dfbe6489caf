"""The server: ASGI routes (Starlette), authentication, limits, metrics and draining."""
