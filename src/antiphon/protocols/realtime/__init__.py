"""The parts shared by the dialects that are shaped like OpenAI's Realtime API. This is not a dialect itself.

`messages` are the clients' messages, `input_fields`, `session_fields` and `items` the objects in them. `commands`
converts a message into a command. `writer`, `transcript_events` and `conversation_events` write a session's events.
"""
