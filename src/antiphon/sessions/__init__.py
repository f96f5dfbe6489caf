"""Live sessions: transcription, speech, conversation, duplex, video. No session knows a wire dialect, a model's name or a socket."""
