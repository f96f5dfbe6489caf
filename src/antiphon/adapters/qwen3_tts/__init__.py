"""Qwen3-TTS, 12 Hz (arXiv:2601.15621) as a synthesizer on the engine. Written anew from its published behaviour."""

from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts

__all__ = ["Qwen3Tts"]
