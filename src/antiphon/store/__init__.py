"""The server's files and databases: model files with their sources and sha256, uploaded voices, stored sessions.

This package does not interpret model files, and runs no code from downloads.
"""

from antiphon.store.fetch import Store
from antiphon.store.registry import MODELS, PROFILES, Model, ModelFile

__all__ = ["MODELS", "PROFILES", "Model", "ModelFile", "Store"]
