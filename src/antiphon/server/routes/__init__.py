"""HTTP and WebSocket routes: each identifies its caller, checks the request, and hands it to a model or a live session."""
