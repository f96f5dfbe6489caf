"""Qwen3-Omni (arXiv:2509.17765): a conversation model that hears, sees, writes and speaks."""

from antiphon.adapters.qwen3_omni.model import Qwen3Omni

__all__ = ["Qwen3Omni"]
