"""Reads what a client sends into typed messages, and checks what types cannot say.

Messages and their objects are `msgspec.Struct` classes: a field's type says what is accepted, UNSET or a default stands
for a field that is missing, and unknown fields are ignored unless the class forbids them. All functions raise
RemoteProtocolError, whose `param` is the path of the field at fault and whose message a client can be shown.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from difflib import get_close_matches
from functools import cache, lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, cast, get_args

import msgspec
from msgspec import inspect

from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64, split_data_uri
from antiphon.protocols.wire import JSON_ERRORS, MAX_JSON_VALUES, SMALL_JSON, decode_json, is_too_complex

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
EMPTY = msgspec.Raw(b"{}")
# The most characters of any text that a client sends, in one field. Models take a fraction of it; audio and images have
# limits of their own.
MAX_TEXT = 256 << 10
# The type of such a field: a longer text is refused while it is read.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
# How alike a name that is not known is to the one that was meant, as difflib has it.
NEARLY = 0.75
# What clients of other servers send, and is no slip of the pen.
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
# Of the names of one body, so many are looked at, and none that is longer.
MAX_TOLD, MAX_NAME_CHARS = 32, 64
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
# The codes of what is too long or too complex. Dialects that have few codes of their own send these as they are.
LIMIT_CODES = frozenset({"string_above_max_length", "json_too_complex"})
# How msgspec says what is wrong: the reason, then the path of the field unless the whole value is meant.
_REASON = re.compile(r"(?s)(?P<reason>.*?)(?: - at `\$\.?(?P<path>.*)`)?")
_FIELD = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`")
_TOO_LONG = re.compile(r"Expected `str` of length <= (?P<most>\d+)")
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`(, got `.*`)?")
_VALUE = re.compile(r"(?s)Invalid (enum )?value '?(?P<value>.*?)'?")
# What clients are told of types, which they know by Python's names.
_TYPE_NAMES = {"object": "dict", "array": "list", "float": "int or float"}


class Reader(Generic[T]):
    """Reads the JSON text of one struct, or of a union of them, and keeps a decoder that forbids unknown fields.

    That one is tried first: a message that it reads has no unknown name, and is not decoded again by `check_names`.
    """

    def __init__(self, kind: TypeForm[T]) -> None:
        self._kind = kind
        members: tuple[type[msgspec.Struct], ...] = get_args(kind) or (cast(Any, kind),)
        # The `type` of each member, in their order.
        self.tags = tuple(str(member.__struct_config__.tag) for member in members)
        closed: Any = reduce(or_, map(_closed, members))
        self._closed: msgspec.json.Decoder[T] = msgspec.json.Decoder(closed)

    def read(self, data: str | bytes | msgspec.Raw, where: str = "") -> T:
        """The JSON text as a value; `where` and what is raised are as in `decode`."""
        check_complexity(data)
        try:
            return self._closed.decode(data)
        except JSON_ERRORS:
            found: T = decode(data, self._kind, where)
            return found


def _closed(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A subclass of a struct that forbids unknown fields."""
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__, (), bases=(kind,), tag_field=config.tag_field, tag=config.tag, forbid_unknown_fields=True
    )


def _decoded(decoder: msgspec.json.Decoder[T], data: str | bytes | msgspec.Raw, where: str) -> T:
    """The JSON text as a value. Raises RemoteProtocolError as `decode`, also for what was read as another type: msgspec
    looks into nothing that a type leaves out.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise refusal(error, where) from None
    except JSON_ERRORS as error:
        raise RemoteProtocolError("invalid_json", f"The body is not valid JSON: {error}", where or None) from None


def any_value(data: str | bytes | msgspec.Raw, where: str = "") -> Any:
    """The JSON text as a value of any type. `where` is its path. Raises RemoteProtocolError as `decode`."""
    return _decoded(_ANY, data, where)


@cache
def _type_info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _unknown(value: Any, kind: inspect.Type, where: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The paths of what a value has that its type knows nothing of, each with the names that its object may have. What
    is null says nothing, unless its name is nearly one of ours; what is left as it was sent (Raw, object) is not looked
    into.
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
    """Raise RemoteProtocolError (`unknown_parameter`) for a field that the type does not know, and whose name is nearly
    that of one it does: a client that meant it would not notice. Fields of other names are a vendor's own, and ignored.
    """
    for path, meant in _told(data, kind, where):
        if meant:
            raise unknown_parameter(path, meant)


def _told(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str) -> Iterator[tuple[str, str]]:
    """The paths of what is not known, each with what was meant. Of each name the first counts, and MAX_TOLD of them."""
    seen: set[str] = set()
    for path, known in _unknown(any_value(data, where), _type_info(cast(Hashable, kind)), where):
        if (name := path.rpartition(".")[2]) not in seen and len(seen) < MAX_TOLD:
            seen.add(name)
            yield path, nearest(name, known)


def check_names(
    data: str | bytes | msgspec.Raw, message: msgspec.Struct, where: str = "", *, strict: bool = False
) -> None:
    """Raise RemoteProtocolError (`unknown_parameter`) as `check_typos`, for the names of an object alone, which was
    read as `message`: these cost little to look at. `where`: its path. `strict`: for any name that it does not know.
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
    """The JSON text as a struct, as `decode` and `check_names` have it."""
    found: T = _reader(cast(Hashable, kind)).read(data, where)
    check_names(data, cast(msgspec.Struct, found), where)
    return found


@cache
def _reader(kind: Hashable) -> Reader[Any]:
    return Reader(cast(Any, kind))


@lru_cache(4096)
def nearest(name: str, known: frozenset[str]) -> str:
    """The one of the `known` names that `name` nearly is; "" for none, and for what clients of other servers send."""
    if name in ELSEWHERE or len(name) > MAX_NAME_CHARS:
        return ""
    return next(iter(get_close_matches(name, sorted(known), 1, NEARLY)), "")


def unknown_parameter(path: str, meant: str = "") -> RemoteProtocolError:
    """What a client is told of a field that there is not. `meant`: the name that it nearly has."""
    hint = f" Did you mean '{meant}'?" if meant else ""
    return RemoteProtocolError("unknown_parameter", f"Unknown parameter: '{path}'.{hint}", path)


class Unread(msgspec.Struct):
    """What a client is told of a field that is not read, in the `warnings` of an answer."""

    code: str
    param: str
    message: str


def warnings_of(
    data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "", also: Iterable[str] = ()
) -> list[Unread]:
    """Return a warning for each field that the type does not know; [] mostly, and for names that cannot be read.
    `also`: fields that are read elsewhere.
    """
    try:
        found = list(_told(data, kind, where))
    except RemoteProtocolError:
        return []
    told = (unknown_parameter(path, meant) for path, meant in found if path not in also)
    return [Unread(error.code, error.param or "", error.message) for error in told]


def check_complexity(data: str | bytes | msgspec.Raw) -> None:
    """Raise RemoteProtocolError (`json_too_complex`) for JSON text that may not be decoded.

    A Raw is a part of a text that was checked as a whole.
    """
    if not isinstance(data, msgspec.Raw) and len(data) > SMALL_JSON and is_too_complex(data):
        raise RemoteProtocolError("json_too_complex", f"The JSON has more than {MAX_JSON_VALUES} values.")


def decode(data: str | bytes | msgspec.Raw, kind: TypeForm[T], where: str = "") -> T:
    """The JSON text as a value of `kind`. `where` is the path of the value, empty for a whole message.

    Raises RemoteProtocolError: `invalid_json`; `invalid_type`, `missing_required_parameter`, `unknown_parameter` or
    `invalid_value` for a field, with its path as `param`; `string_above_max_length` for a text that is too long;
    `json_too_complex` for a whole message (`check_complexity`). A message of a union whose `type` no member has is an
    `invalid_value` of `type`.
    """
    check_complexity(data)
    found: T = _decoded(_decoder(cast(Hashable, kind)), data, where)
    return found


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, kind))


def refusal(error: msgspec.ValidationError, where: str = "") -> RemoteProtocolError:
    """What a client is told of a value that has another type than its field, in the words of `typed` and `known`.

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
            # Null is accepted, and is no help to somebody who wanted to give a value.
            types.remove("null")
        names = " or ".join(_TYPE_NAMES.get(t, t) for t in types)
        return RemoteProtocolError("invalid_type", f"Invalid type for '{path}': expected {names}.", path or None)
    if value := _VALUE.fullmatch(reason):
        return RemoteProtocolError("invalid_value", f"Invalid value: '{value['value']}'.", path or None)
    return RemoteProtocolError("invalid_value", f"Invalid value for '{path}': {reason}.", path or None)


def too_long(param: str, most: int = MAX_TEXT) -> RemoteProtocolError:
    """The error for a text of more than `most` characters in the field `param`."""
    return RemoteProtocolError(
        "string_above_max_length", f"Invalid value for '{param}': at most {most} characters.", param
    )


def check_length(num_chars: int, param: str) -> None:
    """Raise `too_long` for more than MAX_TEXT characters: of a text whose type is not Text, or of several together."""
    if num_chars > MAX_TEXT:
        raise too_long(param)


def json_object(data: str | bytes, name: str = "body", param: str | None = None) -> msgspec.Raw:
    """A JSON object as it was sent: a request's body, or the form field `name`.

    Raises RemoteProtocolError: `invalid_json`, with the reason and `param`, or `invalid_type` for another value.
    """
    try:
        value = decode_json(data)
    except ValueError as error:
        raise RemoteProtocolError("invalid_json", f"The {name} is not valid JSON: {error}", param) from None
    typed(value, dict, name)
    return msgspec.Raw(data)


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


def typed(value: Any, kinds: type | tuple[type, ...], param: str) -> Any:
    """`value`, which has to be of one of the types `kinds`. A bool is no int here, unlike in Python.

    Raises RemoteProtocolError (`invalid_type`), whose message names the types as Python does, and NoneType as null.
    """
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': expected {names}.", param)
    return value


def number(value: Any, param: str, low: float, high: float) -> float:
    """`value` as a float, which has to be an int or a float in [low, high]; NaN is outside any range.

    Raises RemoteProtocolError: `invalid_type`, or `invalid_value` with the range in its message.
    """
    typed(value, (int, float), param)
    if not low <= value <= high:
        expected = f"expected {_plain(low)} to {_plain(high)}"
        raise RemoteProtocolError("invalid_value", f"Invalid value for '{param}': {expected}.", param)
    return float(value)


def _plain(value: float) -> str:
    """A number in full, without an exponent."""
    return str(int(value)) if value == int(value) else f"{value:g}"


def seed(value: int | None) -> int | None:
    """The seed in [0, 2^64). Generators take no negative ones; as two's complement, each has a seed of its own.

    None stays None. Raises RemoteProtocolError, `invalid_value`, for a number of more than 64 bits.
    """
    if value is None:
        return None
    number(value, "seed", -(2**63), 2**63 - 1)
    return value % 2**64
