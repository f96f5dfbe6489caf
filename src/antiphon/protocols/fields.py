"""Reads a client's JSON into typed messages, and checks what types cannot express.

Messages and their objects are `msgspec.Struct` classes. A field's type says which values are accepted. A missing field
gets its default, which may be UNSET. Unknown fields are ignored unless the class forbids them. All functions raise
RemoteProtocolError. Its `param` is the path of the field at fault, and its message may be shown to the client.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from difflib import get_close_matches
from functools import cache, lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, inspect

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.protocols.wire import JSON_ERRORS, MAX_JSON_VALUES, SMALL_JSON, decode_json, is_too_complex

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
G = TypeVar("G", bound=msgspec.Struct)
EMPTY = msgspec.Raw(b"{}")
# Maximum length of one text field, in characters. It is far more than models can take. Audio and images have separate
# limits.
MAX_TEXT = 256 << 10
# Type of a text field. Decoding refuses longer text.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
# Minimum similarity at which a known name is suggested for an unknown one: the cutoff of `difflib.get_close_matches`.
NEARLY = 0.75
# Fields that clients of other servers send on purpose. They never count as typing errors.
ELSEWHERE = frozenset(
    [
        "context",
        "emo_text",
        "frame_rate",
        "function_call",
        "functions",
        "max_new_tokens",
        "max_tokens",
        "min_tokens",
        "models",
        "parse_tool_calls",
        "reasoning_format",
        "ref_audio_path",
        "repeat_penalty",
        "return_timestamps",
        "rid",
        "speaker_id",
        "streaming",
        "timestamps",
        "to_language",
        "tool_ids",
        "top_logprobs",
        "voice_id",
    ]
)
# Limits of the search for similar names: the number of unknown names in one body, and the length of a name.
MAX_TOLD, MAX_NAME_CHARS = 32, 64
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
# Error codes for values that are too long or too complex. Dialects that replace other codes send these unchanged.
LIMIT_CODES = frozenset({"string_above_max_length", "json_too_complex"})
# The parts of msgspec's error messages: the reason, and the path of the field if the error is about a single field.
_REASON = re.compile(r"(?s)(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?")
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`")
_TOO_LONG = re.compile(r"Expected `str` of length <= (?P<most>\d+)")
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`(, got `.*`)?")
_VALUE = re.compile(r"(?s)Invalid (enum )?value '?(?P<value>.*?)'?")
# Error messages call JSON types by their Python names, which clients expect.
_TYPE_NAMES = {"object": "dict", "array": "list", "float": "int or float"}


class Reader(Generic[T]):
    """Decodes JSON text into a struct or a union of structs. First tries a decoder that forbids unknown fields.

    If that decoder accepts a message, it has no unknown names, and `check_names` need not decode it again.
    """

    def __init__(self, kind: TypeForm[T]) -> None:
        self._kind = kind
        members: tuple[type[msgspec.Struct], ...] = get_args(kind) or (cast(Any, kind),)
        # The `type` of each member, in the order of the union.
        self.tags = tuple(str(member.__struct_config__.tag) for member in members)
        closed: Any = reduce(or_, map(_closed, members))
        self._closed: msgspec.json.Decoder[T] = msgspec.json.Decoder(closed)

    def read(self, data: str | bytes | msgspec.Raw, where: str = "") -> T:
        """Decode JSON text. `where` and the errors are the same as for `decode`."""
        check_complexity(data)
        try:
            return self._closed.decode(data)
        except JSON_ERRORS:
            found: T = decode(data, self._kind, where)
            return found


def _closed(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a subclass of a struct that forbids unknown fields."""
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__, (), bases=(kind,), tag_field=config.tag_field, tag=config.tag, forbid_unknown_fields=True
    )


def _decoded(decoder: msgspec.json.Decoder[T], data: str | bytes | msgspec.Raw, where: str) -> T:
    """Decode JSON text. Raises the same errors as `decode`.

    msgspec does not decode the parts of a message that the type does not declare.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise refusal(error, where) from None
    except JSON_ERRORS as error:
        raise RemoteProtocolError("invalid_json", f"The body is not valid JSON: {error}", where or None) from None


def any_value(data: str | bytes | msgspec.Raw, where: str = "") -> Any:
    """Decode JSON text into plain Python values. `where` is its path. Raises the same errors as `decode`."""
    return _decoded(_ANY, data, where)


@cache
def _type_info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _unknown(value: Any, kind: inspect.Type, where: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the path of each unknown field, with the names that are allowed at that place.

    Skips a null field, unless its name resembles a known one. Does not search values of the types Raw and object.
    """
    match kind:
        case inspect.UnionType(types=kinds):
            structs = [k for k in kinds if isinstance(k, inspect.StructType)]
            if isinstance(value, dict) and structs:
                tag = value.get(structs[0].tag_field) if structs[0].tag_field else None
                yield from _unknown(value, next((k for k in structs if k.tag == tag), structs[0]), where)
            elif isinstance(value, list):
                yield from (p for k in kinds if isinstance(k, inspect.ListType) for p in _unknown(value, k, where))
        case inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            for name, inner in value.items():
                path = f"{where}.{name}" if where else name
                if name in known:
                    yield from _unknown(inner, known[name], path)
                elif name != kind.tag_field and (inner is not None or nearest(name, frozenset(known))):
                    yield path, frozenset(known)
        case inspect.ListType(item_type=item) if isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _unknown(inner, item, f"{where}[{number}]")


def check_typos(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "") -> None:
    """Raise RemoteProtocolError (`unknown_parameter`) for an unknown field whose name resembles a known one.

    Without this error, a client would not notice that it mistyped a name. Other unknown fields are ignored, because
    they are probably vendor extensions.
    """
    for path, meant in _errors(data, kind, where):
        if meant:
            raise unknown_parameter(path, meant)


def _errors(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each unknown field, and the known name that it resembles. Each name counts once.

    Yields at most MAX_TOLD names.
    """
    seen: set[str] = set()
    for path, known in _unknown(any_value(data, where), _type_info(cast(Hashable, kind)), where):
        if (name := path.rpartition(".")[2]) not in seen and len(seen) < MAX_TOLD:
            seen.add(name)
            yield path, nearest(name, known)


def check_names(
    data: str | bytes | msgspec.Raw, message: msgspec.Struct, where: str = "", *, strict: bool = False
) -> None:
    """Check the field names of one object, without its values. Raises the same errors as `check_typos`.

    `message` is the decoded object, and `where` is its path. `strict` refuses every unknown name. This check is
    cheap, because it covers the names of one object only.
    """
    if message.__struct_config__.forbid_unknown_fields:
        return
    known = {*message.__struct_encode_fields__, message.__struct_config__.tag_field}
    for name in _decoded(_FIELDS, data, where):
        if name not in known:
            meant = nearest(name, frozenset(filter(None, known)))
            if strict or meant:
                raise unknown_parameter(f"{where}.{name}" if where else name, meant)


def decode_named(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "") -> T:
    """Decode JSON text into a struct. Raises the errors of `decode` and `check_names`."""
    found: T = _reader(cast(Hashable, kind)).read(data, where)
    check_names(data, cast(msgspec.Struct, found), where)
    return found


@cache
def _reader(kind: Hashable) -> Reader[Any]:
    return Reader(cast(Any, kind))


@lru_cache(4096)
def nearest(name: str, known: frozenset[str]) -> str:
    """Return the `known` name that `name` resembles. Returns "" if there is none, or if `name` is in ELSEWHERE."""
    if name in ELSEWHERE or len(name) > MAX_NAME_CHARS:
        return ""
    return next(iter(get_close_matches(name, sorted(known), 1, NEARLY)), "")


def unknown_parameter(path: str, meant: str = "") -> RemoteProtocolError:
    """Return the error for an unknown field. `meant` is the known name that the field's name resembles, if any."""
    hint = f" Did you mean '{meant}'?" if meant else ""
    return RemoteProtocolError("unknown_parameter", f"Unknown parameter: '{path}'.{hint}", path)


class Unread(msgspec.Struct):
    """A warning in the `warnings` of an answer, about a field that the server does not read."""

    code: str
    param: str
    message: str


def warnings_of(
    data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "", also: Iterable[str] = ()
) -> list[Unread]:
    """Return a warning for each field that the type does not know; [] for JSON that cannot be read.

    `also`: paths of fields that other code reads, so they get no warning.
    """
    try:
        found = list(_errors(data, kind, where))
    except RemoteProtocolError:
        return []
    unread = (unknown_parameter(path, meant) for path, meant in found if path not in also)
    return [Unread(error.code, error.param or "", error.message) for error in unread]


def check_complexity(data: str | bytes | msgspec.Raw) -> None:
    """Raise RemoteProtocolError (`json_too_complex`) for JSON text that is too complex to decode.

    Does not check a Raw, because it is part of a text that was already checked.
    """
    if not isinstance(data, msgspec.Raw) and len(data) > SMALL_JSON and is_too_complex(data):
        raise RemoteProtocolError("json_too_complex", f"The JSON has more than {MAX_JSON_VALUES} values.")


def decode(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "") -> T:
    """Decode JSON text into a value of `kind`. `where` is the path of the value; it is empty for a whole message.

    Raises RemoteProtocolError. Its code is `invalid_json`, or one of the following with the path of the field as
    `param`: `invalid_type`, `missing_required_parameter`, `unknown_parameter` and `invalid_value`. For a text that is
    too long, the code is `string_above_max_length`. For a whole message that `check_complexity` refuses, it is
    `json_too_complex`. If no member of a union has the message's `type`, the code is `invalid_value` for `type`.
    """
    check_complexity(data)
    found: T = _decoded(_decoder(cast(Hashable, kind)), data, where)
    return found


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, kind))


def refusal(error: msgspec.ValidationError, where: str = "") -> RemoteProtocolError:
    """Convert a validation error of msgspec into the error for the client, with the same wording as `typed`.

    `where`: the path of the value that was decoded.
    """
    found = _REASON.fullmatch(str(error))
    assert found
    reason, path = found["reason"], ".".join(filter(None, (where, found["path"])))
    if field := _FIELD.fullmatch(reason):
        param = f"{path}.{field['name']}" if path else field["name"]
        if field["what"] == "contains unknown":
            return unknown_parameter(param)
        return RemoteProtocolError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    if longer := _TOO_LONG.fullmatch(reason):
        return too_long(path, int(longer["most"]))
    if expected := _EXPECTED.fullmatch(reason):
        types = expected["types"].split(" | ")
        if {"int", "float"} <= set(types):
            types.remove("int")
        if "null" in types and (len(types) > 2 or "array" in types):
            # Null is accepted too, but to mention it would not help a client that meant to send a value.
            types.remove("null")
        names = " or ".join(_TYPE_NAMES.get(t, t) for t in types)
        return RemoteProtocolError("invalid_type", f"Invalid type for '{path}': expected {names}.", path or None)
    if value := _VALUE.fullmatch(reason):
        return RemoteProtocolError("invalid_value", f"Invalid value: '{value['value']}'.", path or None)
    return RemoteProtocolError("invalid_value", f"Invalid value for '{path}': {reason}.", path or None)


def too_long(param: str, most: int = MAX_TEXT) -> RemoteProtocolError:
    """Return the error for a text in the field `param` that is longer than `most` characters."""
    return RemoteProtocolError(
        "string_above_max_length", f"Invalid value for '{param}': at most {most} characters.", param
    )


def check_length(num_chars: int, param: str) -> None:
    """Raise `too_long` for more than MAX_TEXT characters. For text that is not of type Text or has several parts."""
    if num_chars > MAX_TEXT:
        raise too_long(param)


def json_object(data: str | bytes, name: str = "body", param: str | None = None) -> msgspec.Raw:
    """Return the raw text of a JSON object: a request's body, or the form field `name`.

    Raises RemoteProtocolError: `invalid_json` with the reason and `param`, or `invalid_type` if the value is not an
    object.
    """
    try:
        value = decode_json(data)
    except ValueError as error:
        raise RemoteProtocolError("invalid_json", f"The {name} is not valid JSON: {error}", param) from None
    typed(value, dict, name)
    return msgspec.Raw(data)


def audio_file(text: str, param: str, max_bytes: int) -> bytes:
    """Decode the audio file in a field from base64, or from a `data:` URI of any media type. Fetches nothing.

    Does not check whether the bytes are audio. Raises RemoteProtocolError (`invalid_value`) with `param` for invalid
    data, and for a file of more than `max_bytes`.
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


def typed(value: Any, kinds: type | tuple[type, ...], param: str) -> Any:
    """Return `value` if its type is one of `kinds`. Here, unlike in Python, a bool is not an int.

    Otherwise raises RemoteProtocolError (`invalid_type`). Its message has Python's names of the types, but `null` for
    NoneType.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected {names}.", param)
    return value


def call_arguments(text: str) -> object:
    """Return the arguments of a function call as an object; an empty one if the model wrote anything else."""
    try:
        return typed(msgspec.json.decode(text or "{}"), dict, "arguments")
    except (msgspec.DecodeError, RemoteProtocolError):
        return {}


def number(value: Any, param: str, low: float, high: float) -> float:
    """Return `value` as a float if it is an int or a float in [low, high]. NaN is never in the range.

    Otherwise raises RemoteProtocolError: `invalid_type`, or `invalid_value` with the range in its message.
    """
    typed(value, (int, float), param)
    if not low <= value <= high:
        expected = f"expected {_plain(low)} to {_plain(high)}"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
    return float(value)


def _plain(value: float) -> str:
    """Format a number without an exponent."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def seed(value: int | None) -> int | None:
    """Convert a seed to [0, 2^64), as random generators require. Negative seeds are mapped by two's complement.

    Returns None for None. Raises RemoteProtocolError (`invalid_value`) for a number of more than 64 bits.
    """
    if value is None:
        return None
    number(value, "seed", -(2**63), 2**63 - 1)
    return value % 2**64


def merged(given: G, before: object) -> G:
    """Return `given` with its missing fields filled in from `before`. Null is kept, and stands for the default.

    `before`: the current values, in the form that the client sees. If it is not a struct, nothing is filled in.
    """
    if not isinstance(before, msgspec.Struct):
        return given
    kept = {n: getattr(before, n, UNSET) for n in given.__struct_fields__ if getattr(given, n) is UNSET}
    return msgspec.structs.replace(given, **kept)


def unsupported(value: object, supported: tuple[str, ...], param: str) -> RemoteProtocolError:
    """Return the error for a field whose value is not one of `supported`."""
    names = ", ".join(f"'{name}'" for name in supported)
    return RemoteProtocolError("invalid_value", f"Invalid value: '{value}'. Supported values are: {names}.", param)
