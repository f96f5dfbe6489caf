"""The core's own commands and events: what a client may ask of a session, and what a session reports.

One module for each kind of session. Commands are verbs, events are in the past tense. Nothing here knows a wire
dialect, a model or a socket.
"""
