"""Wire dialects without I/O: each reads frames from a client into commands and writes a session's events as frames.

A dialect is used in three steps by the server: `receive(frame)` reads one frame of the client, `send(event)` takes one
event of the session, and the queues that both fill are drained afterwards: commands for the session, frames for the
client. Nothing here waits, knows a clock, a socket or a model. One folder for each dialect; what several dialects share
stands beside the folders, and docs/wire describes each of them.
"""
