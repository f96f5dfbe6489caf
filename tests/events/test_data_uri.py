"""Decoding of base64 and data URIs."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.events.data_uri import decode_base64, decode_image_uri, split_data_uri


@given(st.binary())
def test_base64_is_read_back(data: bytes) -> None:
    assert decode_base64(b64encode(data).decode()) == data


@given(st.text("ABz09+/= -_\né", max_size=12))
def test_base64_is_what_the_standard_library_takes_for_it(text: str) -> None:
    try:
        expected: bytes | None = b64decode(text, validate=True)
    except ValueError:
        expected = None
    try:
        assert decode_base64(text) == expected
    except ValueError:
        assert expected is None


def test_when_more_than_the_padding_is_there_then_base64_is_read_as_before() -> None:
    assert decode_base64("Bz90=") == b"\x07?t"


@pytest.mark.parametrize("text", ["a", "abc", "ab!=", "YWJj\n", "YWJj YWJj", "é", "data:,YWJj"])
def test_when_text_is_not_strict_base64_then_it_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_base64(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("data:audio/wav;base64,YWJj", ("data:audio/wav;base64", "YWJj")),
        ("data:,a,b", ("data:", "a,b")),
        ("data:image/png;base64", ("", "data:image/png;base64")),
        ("YWJj", ("", "YWJj")),
        ("https://example.org/a,b", ("", "https://example.org/a,b")),
        ("", ("", "")),
    ],
)
def test_a_data_uri_is_split_at_its_first_comma_and_other_text_is_left_alone(text: str, parts: tuple[str, str]) -> None:
    assert split_data_uri(text) == parts


def test_an_image_uri_holds_the_bytes_of_the_image() -> None:
    assert decode_image_uri("data:image/png;base64," + b64encode(b"abc").decode()) == b"abc"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "abc",
        "https://example.org/a.png",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:text/plain;base64,YWJj",
    ],
)
def test_when_a_uri_is_no_image_in_base64_then_the_form_is_named(uri: str) -> None:
    with pytest.raises(ValueError, match="an image is given as data:image/<type>;base64,<data>"):
        decode_image_uri(uri)


def test_when_the_base64_of_an_image_is_broken_then_it_is_refused() -> None:
    with pytest.raises(ValueError, match="the image is not valid base64"):
        decode_image_uri("data:image/png;base64,a!")
