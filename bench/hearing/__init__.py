"""Sections of `antiphon bench asr`: clips, the client that plays them, the figures, and a module for each section."""
