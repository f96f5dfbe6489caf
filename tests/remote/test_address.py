"""The address of a model on another server, and the sources of its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import SettingsError
from antiphon.remote.address import is_address, parse_address, read_key, split_api
from antiphon.settings import load, options

FLAG = "--remote-key-file"


@pytest.mark.parametrize(
    ("text", "urls", "model"),
    [
        ("http://127.0.0.1:11434/v1#qwen3:4b", ("http://127.0.0.1:11434/v1",), "qwen3:4b"),
        ("https://api.example.com/v1/#org/name#2", ("https://api.example.com/v1",), "org/name#2"),
        ("http://a/v1,http://b:1/v1/ , http://a/v1#m", ("http://a/v1", "http://b:1/v1"), "m"),
        ("http://[::1]:8000/v1/responses#m", ("http://[::1]:8000/v1/responses",), "m"),
    ],
)
def test_urls_and_a_model_name_are_read(text: str, urls: tuple[str, ...], model: str) -> None:
    address = parse_address(text, "--language-model")
    assert (address.urls, address.model) == (urls, model)


@pytest.mark.parametrize(
    "text",
    [
        "http://#m",
        "http://h:99999/v1#m",
        "http://h/v1",
        "http://h/v1# ",
        "http://u:p@h/v1#m",
        "http://h?k=1#m",
        "http://h/v1,h2/v1#m",
        "localhost:8000/v1#m",
        "file:///etc/passwd#m",
        "tcp://h:1#m",
        ",#m",
    ],
)
def test_what_is_no_address_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--language-model"):
        parse_address(text, "--language-model")


def test_a_url_without_a_scheme_is_told_which_ones_there_are() -> None:
    with pytest.raises(SettingsError, match="localhost:8000/v1 has no scheme; expected one of http://, tcp://"):
        parse_address("localhost:8000/v1#m", "--transcriber", schemes=("http", "tcp"))


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as error:
        parse_address("https://me:hidden@host/v1#m", "--language-model")
    assert "hidden" not in str(error.value)


def test_only_urls_are_addresses() -> None:
    assert is_address("https://host/v1#m")
    assert is_address("file:///host")
    assert not is_address("vllm:http://host")
    assert not is_address("/models/qwen")


def test_the_key_is_the_variables_else_the_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" secret-1\n")
    assert read_key("", "", FLAG) == ""
    assert read_key("", str(file), FLAG) == "secret-1"
    assert read_key("secret-2", str(file), FLAG) == "secret-2"
    assert load(environment={"ANTIPHON_REMOTE_KEY": "secret-3"}).remote.remote_key == "secret-3"


def test_a_key_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(SettingsError, match=f"--remote-key-file .*{name}"):
            read_key("", str(tmp_path / name), FLAG)


def test_the_key_has_no_flag_and_is_in_no_error(tmp_path: Path) -> None:
    assert "remote_key" in [o.name for o in options() if o.check.secret]
    file = tmp_path / "antiphon.toml"
    file.write_text('[remote]\nremote_key = ["hidden"]\n')
    with pytest.raises(SettingsError) as error:
        load(file=file)
    assert "remote_key" in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_url_is_split_at_the_path_of_an_api() -> None:
    paths = ("/chat/completions", "/responses")
    assert split_api("http://h/v1/responses", paths) == ("http://h/v1", "/responses")
    assert split_api("http://h/v1", paths) == ("http://h/v1", "")
