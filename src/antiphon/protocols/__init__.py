"""Wire dialects without I/O: each reads frames from a client into commands and writes a session's events as frames.

`feed(frame)` reads one frame of the client into commands for the session and answers, `send(event)` writes one event of
the session as frames. Nothing here waits, knows a clock, a socket or a model. One folder for each dialect, which
docs/wire describes; what several dialects share is in `realtime/` and `resume/`, and beside the folders.
"""
