"""Wire dialects without I/O. Each reads a client's frames into commands and writes a session's events as frames.

`feed(frame)` reads one frame of the client. It returns commands for the session and answers to the client.
`send(event)` writes one event of the session as frames. No code here waits or uses a clock, a socket or a model. Each
dialect has a folder, and a page in docs/wire. The parts that dialects share are in `realtime/` and in the modules next
to the folders.
"""
