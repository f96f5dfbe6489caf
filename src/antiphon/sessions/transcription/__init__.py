"""Transcription sessions, which detect turns while audio arrives, decode windows, and send words that are stable."""
