"""Vision-language models on the engine: `session.py` is shared, and each family has one file."""

from antiphon.adapters.vlm.session import VisionLanguageModel

__all__ = ["VisionLanguageModel"]
