"""Deepgram's dialects: transcripts, turns (Flux), speech and files. See docs/wire/deepgram.md."""
