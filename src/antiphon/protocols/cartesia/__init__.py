"""Cartesia's dialects: text to speech in contexts and over HTTP, and transcription. See docs/wire/cartesia.md."""
