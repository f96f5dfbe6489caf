"""Transcription sessions: turns are found while audio comes in, windows are decoded, and words are sent once they are
stable.
"""
