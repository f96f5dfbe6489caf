"""What a process keeps on disk: model files with their sources and sha256, uploaded voices, stored conversations.

It knows no model's meaning, and runs no code of what it downloads.
"""

from antiphon.store.fetch import Store
from antiphon.store.registry import MODELS, PROFILES, Model, ModelFile

__all__ = ["MODELS", "PROFILES", "Model", "ModelFile", "Store"]
