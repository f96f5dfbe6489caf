"""Model files: what exists, where from, sha256, cache. Knows no model's meaning and runs none of its code."""

from antiphon.store.fetch import Store
from antiphon.store.registry import MODELS, PROFILES, Model, ModelFile

__all__ = ["MODELS", "PROFILES", "Model", "ModelFile", "Store"]
