"""HTTP and WebSocket routes: who comes in, with what, and to which session."""
