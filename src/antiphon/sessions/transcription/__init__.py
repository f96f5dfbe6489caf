"""Transcription sessions: turns are detected while audio arrives, windows are decoded, and words are sent once they are
stable.
"""
