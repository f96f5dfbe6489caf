"""Qwen3-ASR (arXiv:2601.21337): a transcriber on the engine, written from the published behaviour of the model."""

from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr

__all__ = ["Qwen3Asr"]
