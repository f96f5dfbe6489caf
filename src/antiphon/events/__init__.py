"""The commands and events of the core: what a client asks of a session, and what a session reports.

Each kind of session has a module. Commands are verbs, events are in the past tense. Nothing here depends on a wire
dialect, a model or a socket.
"""
