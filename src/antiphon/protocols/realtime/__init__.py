"""The parts shared by the dialects that resemble OpenAI's Realtime API. This folder is not itself a dialect.

`messages` has the clients' messages. `input_fields`, `session_fields` and `items` have the objects in these messages.
`commands` converts a message into a command. `writer`, `transcript_events` and `conversation_events` write events.
"""
