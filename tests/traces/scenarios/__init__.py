"""What clients do, dialect by dialect: each sends frames, reads frames and asserts a little of what they mean."""

from tests.traces.scenarios import conversation, duplex, transcription

ALL = (conversation, transcription, duplex)
