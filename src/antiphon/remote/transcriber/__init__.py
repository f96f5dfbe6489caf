"""A transcriber on other servers: `--transcriber URL#MODEL`.

`transcriber.py` implements the contract of transcribers with the servers of a pool. `kinds.py` finds out what kind of
server a URL is. The kinds are of two sorts. *Window servers* transcribe a file: over REST (`rest.py`) or Wyoming
(`wyoming.py`). *Streaming servers* hear audio as it arrives, over a WebSocket (`sockets.py`). `heard.py` turns what
they return into hypotheses, and `pace.py` limits how often window servers decode partials.
"""
