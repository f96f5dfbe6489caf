"""Qwen3-Omni (arXiv:2509.17765) as the partner of a conversation: it hears, sees, writes and speaks."""

from antiphon.adapters.qwen3_omni.partner import Qwen3Omni

__all__ = ["Qwen3Omni"]
