"""The commands that clients send to a session, and the events that a session reports.

Each kind of session has a module. Names of commands are verbs, and names of events are in the past tense. Nothing here
depends on a wire dialect, a model or a socket.
"""
