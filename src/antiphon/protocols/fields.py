"""Checks of what a client sends, field by field.

Each returns the value that it accepts, or raises RemoteProtocolError whose `param` is the path of the field and whose
message a client can be shown. `typed` and `number` check for themselves; what a dialect allows beyond that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.protocols.wire import decode_json


def json_body(data: str | bytes, name: str = "body", param: str | None = None) -> dict[str, Any]:
    """The JSON object that a request's body, or the form field `name`, holds.

    Raises RemoteProtocolError: `invalid_json`, with the reason and `param`, or `invalid_type` for another value.
    """
    try:
        value = decode_json(data)
    except ValueError as error:
        raise RemoteProtocolError("invalid_json", f"The {name} is not valid JSON: {error}", param) from None
    return dict(typed(value, dict, name))


def audio_file(text: str, param: str, max_bytes: int) -> bytes:
    """The bytes of an audio file in a field, which is base64 or a `data:` URI of any media type. Nothing is fetched.

    Raises RemoteProtocolError (`invalid_value`) that names `param`, also for a file of more than `max_bytes`. Whether
    the bytes are audio is not checked.
    """
    _, body = split_data_uri(text)
    if "://" in body[:16]:
        expected = "expected base64, or data:audio/...;base64,...: nothing is fetched"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
    try:
        data = decode_base64(body)
    except ValueError:
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{param}': expected valid base64.", param
        ) from None
    if len(data) > max_bytes:
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{param}': at most {max_bytes >> 20} MiB.", param
        )
    return data


def require(fields: dict[str, Any], key: str, kinds: type | tuple[type, ...], param: str) -> Any:
    """`fields[key]`, which has to be there and of one of the types `kinds`; None counts as a value of its own type.

    Raises RemoteProtocolError: `missing_required_parameter`, or `invalid_type` as `typed` does.
    """
    if key not in fields:
        raise RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    return typed(fields[key], kinds, param)


def typed(value: Any, kinds: type | tuple[type, ...], param: str) -> Any:
    """`value`, which has to be of one of the types `kinds`. A bool is no int here, unlike in Python.

    Raises RemoteProtocolError (`invalid_type`), whose message names the types as Python does, and NoneType as null.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected {names}.", param)
    return value


def known(fields: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Check that an object has none but the `allowed` fields. `where` is its path, empty for the event itself.

    Raises RemoteProtocolError (`unknown_parameter`) for the first field that is not allowed, in the client's order.
    """
    for name in fields:
        if name not in allowed:
            param = f"{where}.{name}" if where else name
            raise RemoteProtocolError("unknown_parameter", f"Unknown parameter: '{param}'.", param)


def number(value: Any, param: str, low: float, high: float) -> float:
    """`value` as a float, which has to be an int or a float in [low, high]; NaN is outside any range.

    Raises RemoteProtocolError: `invalid_type`, or `invalid_value` with the range in its message.
    """
    typed(value, (int, float), param)
    if not low <= value <= high:
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': expected {low:g} to {high:g}.", param)
    return float(value)
