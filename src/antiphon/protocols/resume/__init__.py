"""Resuming a session on a new connection: the journal of sent frames, the resume token and the messages about it."""
