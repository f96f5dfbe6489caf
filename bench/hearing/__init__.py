"""Sections of `antiphon bench asr`, one module each, with their clips, the client that plays them and the figures."""
