"""Live sessions: transcription, speech, conversation, full duplex, video.

No session knows a wire dialect, the name of a model, or a socket.
"""
