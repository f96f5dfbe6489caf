"""What clients do, dialect by dialect: each sends frames, reads frames and asserts a little of what they mean."""

from tests.traces.scenarios import bridges, conversation, duplex, native, rest, resume, speech, transcription, video

ALL = (conversation, transcription, duplex, native, resume, speech, video, bridges, rest)
