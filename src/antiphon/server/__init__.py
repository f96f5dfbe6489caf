"""ASGI (Starlette): routes, auth, limits, metrics, drain. The only room that knows sockets."""
