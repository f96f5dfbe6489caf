"""Streaming transcription: turns are found while sound comes, windows are decoded, words that stand are sent."""
