"""HTTP and WebSocket routes. Each identifies its caller, checks the request, and passes it to a model or a session."""
