"""Released checkpoints: their manifests, and what a folder has of one. Reads headers and JSON, never weights."""

from antiphon.released.manifest import Family, Release, families, releases

__all__ = ["Family", "Release", "families", "releases"]
