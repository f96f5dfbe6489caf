"""Live sessions: each connects a wire, a session and an attachment."""
