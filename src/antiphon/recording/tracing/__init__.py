"""The durations of each turn's stages in a conversation, and their export as OpenTelemetry traces."""
