"""Tests that messages are decoded once, and searched for unknown names only if the first decoder refuses them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from antiphon.errors import RemoteProtocolError
from antiphon.protocols.fields import Reader, check_names, decode, decode_named


class Message(msgspec.Struct, tag_field="type", kw_only=True):
    event_id: object = None


class Append(Message, tag="append", kw_only=True):
    audio: str
    sample_rate: int = 16_000


class Commit(Message, tag="commit", kw_only=True):
    final: bool = False


class Part(msgspec.Struct):
    text: str = ""
    inner: Append | None = None


READER: Reader[Append | Commit] = Reader(Append | Commit)


def text_of(**fields: Any) -> str:
    return json.dumps(fields)


def test_a_message_without_unknown_names_is_not_decoded_again() -> None:
    message = READER.read(text_of(type="append", audio="AA", event_id="e"))
    assert isinstance(message, Append)
    assert (message.audio, message.sample_rate, message.event_id) == ("AA", 16_000, "e")
    # The text is not decoded: its invalid JSON would be refused.
    check_names("{", message, strict=True)


def test_the_type_of_a_message_decides_its_class() -> None:
    message = READER.read(text_of(type="commit", final=True))
    check_names("{", message, strict=True)
    match message:
        case Commit(final=final):
            assert final
        case other:
            pytest.fail(f"read as {other}")


@pytest.mark.parametrize(
    ("strict", "name", "reported"),
    [
        (False, "sample_rat", "Unknown parameter: 'sample_rat'. Did you mean 'sample_rate'?"),
        (True, "vendor", "Unknown parameter: 'vendor'."),
        (False, "vendor", None),
    ],
)
def test_a_message_with_an_unknown_name_is_read_and_the_name_is_found(
    strict: bool, name: str, reported: str | None
) -> None:
    data = text_of(type="append", audio="AA", **{name: 1})
    message = READER.read(data)
    assert isinstance(message, Append)
    assert message.audio == "AA"
    if reported is None:
        check_names(data, message, strict=strict)
        return
    with pytest.raises(RemoteProtocolError, match=reported.replace("?", r"\?")):
        check_names(data, message, strict=strict)


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[]",
        b"\xff",
        text_of(type="other"),
        text_of(type="append"),
        text_of(type="append", vendor=1),
        text_of(type="append", audio=1, vendor=2),
        text_of(vendor=1, type="append", audio="A", sample_rate="x"),
    ],
)
def test_what_is_wrong_is_told_as_without_the_first_attempt(data: str | bytes) -> None:
    with pytest.raises(RemoteProtocolError) as expected:
        decode(data, Append | Commit)
    with pytest.raises(RemoteProtocolError) as found:
        READER.read(data)
    assert (found.value.code, found.value.message, found.value.param) == (
        expected.value.code,
        expected.value.message,
        expected.value.param,
    )


def test_names_of_inner_objects_are_not_looked_at() -> None:
    inner = {"type": "append", "audio": "AA", "sample_rat": 1}
    assert decode_named(text_of(text="a", inner=inner), Part).text == "a"


def test_an_object_is_named_by_its_path() -> None:
    with pytest.raises(RemoteProtocolError) as error:
        decode_named(text_of(txt="a"), Part, "item.content[0]")
    assert error.value.param == "item.content[0].txt"


def test_a_wrong_type_is_named_by_its_path() -> None:
    with pytest.raises(RemoteProtocolError) as error:
        decode_named(text_of(text=1), Part, "item.content[0]")
    assert (error.value.code, error.value.param) == ("invalid_type", "item.content[0].text")
