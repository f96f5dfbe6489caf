"""Checks of the fields a client sends: each returns the value or raises RemoteProtocolError that names the field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.wire import decode_base64


def sound_file(given: str, param: str, most: int) -> bytes:
    """A sound file that a client brings along, base64 or a data: URI. Raises RemoteProtocolError: nothing is fetched."""
    body = given.partition(",")[2] if given.startswith("data:") else given
    if "://" in body[:16]:
        expected = "expected base64, or data:audio/...;base64,...: nothing is fetched"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
    try:
        sound = decode_base64(body)
    except ValueError:
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{param}': expected valid base64.", param
        ) from None
    if len(sound) > most:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': at most {most >> 20} MiB.", param)
    return sound


def require(fields: dict[str, Any], key: str, kinds: type | tuple[type, ...], param: str) -> Any:
    """`fields[key]` if it is there and of one of `kinds`. Raises RemoteProtocolError."""
    if key not in fields:
        raise RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    return typed(fields[key], kinds, param)


def typed(value: Any, kinds: type | tuple[type, ...], param: str) -> Any:
    """`value` if it is of one of `kinds` (a bool is no number). Raises RemoteProtocolError."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected {names}.", param)
    return value


def known(fields: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises RemoteProtocolError for the first field that is not allowed."""
    for name in fields:
        if name not in allowed:
            param = f"{where}.{name}" if where else name
            raise RemoteProtocolError("unknown_parameter", f"Unknown parameter: '{param}'.", param)


def number(value: Any, param: str, low: float, high: float) -> float:
    """A number in [low, high]. Raises RemoteProtocolError."""
    typed(value, (int, float), param)
    if not low <= value <= high:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': expected {low:g} to {high:g}.", param)
    return float(value)
