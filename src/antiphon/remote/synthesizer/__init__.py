"""Voices on other servers.

`rest.py` and `stream.py` send texts over two protocols and yield the audio of the answer, `sound.py` reads that audio,
`voices.py` asks a server for its voices, and `synthesizer.py` combines them into a Synthesizer.
"""
