"""Combines the turn detectors of the settings: those of this process, and those on other servers."""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.contracts import TurnDetector
from antiphon.loading.selection import NamedDetector, named_detectors
from antiphon.pipelines.turn_blend import BlendPart, DetectorFailures, TurnBlend
from antiphon.remote.turn_detector import RemoteTurnDetector
from antiphon.remote.turn_socket import RemoteTurnSocket
from antiphon.settings import Settings


def turn_blend(
    settings: Settings, detectors: Mapping[str, TurnDetector], failures: DetectorFailures
) -> TurnBlend | None:
    """Return the blend of the named detectors, or of the profile's detector. None if there is none.

    Args:
        settings: Names the detectors with their weights.
        detectors: The loaded detectors, by id.
        failures: Counts what they do not judge.

    Raises:
        ModelError: Two of the detectors have no language in common.
    """
    named = named_detectors(settings.models.turn_detector) or [NamedDetector(name, 1.0) for name in detectors]
    key = settings.models.turn_detector_key
    parts = [
        BlendPart(one.id, _remote(one.name, key) if one.is_remote else detectors[one.id], one.weight) for one in named
    ]
    return TurnBlend(parts, failures) if parts else None


def _remote(url: str, key: str) -> TurnDetector:
    return RemoteTurnSocket(url, key) if url.startswith("ws") else RemoteTurnDetector(url, key)
