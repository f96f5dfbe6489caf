"""HTTP and WebSocket routes: each identifies its caller, checks the request, and gives it to a model or a session."""
