"""Wire dialects, without I/O. A dialect decodes a client's frames into commands and encodes a session's events.

`feed(frame)` reads one frame from the client. It returns commands for the session and answers for the client.
`send(event)` returns the frames of one event. No code here waits, or uses a clock, a socket or a model. Each dialect
has its own folder here and its own page in docs/wire. Code that dialects share is in `realtime/` and in the modules
next to the folders.
"""
