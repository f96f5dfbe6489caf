"""What the dialects that are shaped like OpenAI's Realtime API have in common. No dialect itself: each has these parts.

`messages` are what clients send, `input_fields`, `session_fields` and `items` the objects in them; `commands` reads a
message into a command; `writer`, `transcript_events` and `conversation_events` write what a session reports.
"""
