"""Qwen3-TTS, 12 Hz (arXiv:2601.15621): a synthesizer on the engine, written from the model's published behaviour."""

from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts

__all__ = ["Qwen3Tts"]
