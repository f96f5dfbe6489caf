"""Silero VAD: a speech detector."""
