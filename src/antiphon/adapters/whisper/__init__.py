"""Whisper by CTranslate2: a transcriber."""
