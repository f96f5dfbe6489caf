"""Models that see pictures, on the engine: `watching.py` is what their sessions share, one file a family is how each is told what."""

from antiphon.adapters.pictures.watching import PictureModel

__all__ = ["PictureModel"]
