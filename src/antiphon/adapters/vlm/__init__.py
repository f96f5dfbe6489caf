"""Models that see pictures, on the engine: `watching.py` is what their sessions share, one file a family is how each is told what."""

from antiphon.adapters.vlm.session import VisionLanguageModel

__all__ = ["VisionLanguageModel"]
