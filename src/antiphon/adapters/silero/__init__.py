"""Silero VAD: a voice activity detector."""
