"""Qwen3-ASR (arXiv:2601.21337) as a transcriber on the engine. Written anew from its published behaviour."""

from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr

__all__ = ["Qwen3Asr"]
