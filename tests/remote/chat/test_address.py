"""The address of a model on another server, and the sources of its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import SettingsError
from antiphon.remote.chat.address import ServerAddress, is_address, parse_address, read_key
from antiphon.settings import RemoteSettings, load, options


@pytest.mark.parametrize(
    ("text", "url", "model"),
    [
        ("http://127.0.0.1:11434/v1#qwen3:4b", "http://127.0.0.1:11434/v1/chat/completions", "qwen3:4b"),
        ("https://api.example.com/v1/#org/name#2", "https://api.example.com/v1/chat/completions", "org/name#2"),
        ("http://[::1]:8000/v1/chat/completions#m", "http://[::1]:8000/v1/chat/completions", "m"),
        ("https://api.example.com/v1/responses#gpt", "https://api.example.com/v1/responses", "gpt"),
    ],
)
def test_a_url_and_a_model_name_are_read(text: str, url: str, model: str) -> None:
    address = parse_address(text, "--language-model")
    assert (address.url, address.model) == (url, model)


@pytest.mark.parametrize(
    "text", ["http://#m", "http://h:99999/v1#m", "http://h/v1", "http://h/v1# ", "http://u:p@h/v1#m", "http://h?k=1#m"]
)
def test_what_is_no_address_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--language-model"):
        parse_address(text, "--language-model")


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as error:
        parse_address("https://me:hidden@host/v1#m", "--language-model")
    assert "hidden" not in str(error.value)


def test_only_http_urls_are_addresses() -> None:
    assert is_address("https://host/v1#m")
    assert not is_address("vllm:http://host")
    assert not is_address("/models/qwen")


def test_the_key_is_the_variables_else_the_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" secret-1\n")
    assert read_key(RemoteSettings()) == ""
    assert read_key(RemoteSettings(remote_key_file=str(file))) == "secret-1"
    assert read_key(RemoteSettings(remote_key="secret-2", remote_key_file=str(file))) == "secret-2"
    assert load(environment={"ANTIPHON_REMOTE_KEY": "secret-3"}).remote.remote_key == "secret-3"


def test_a_key_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(SettingsError, match=f"--remote-key-file .*{name}"):
            read_key(RemoteSettings(remote_key_file=str(tmp_path / name)))


def test_the_key_has_no_flag_and_is_in_no_error(tmp_path: Path) -> None:
    assert "remote_key" in [o.name for o in options() if o.check.secret]
    file = tmp_path / "antiphon.toml"
    file.write_text('[remote]\nremote_key = ["hidden"]\n')
    with pytest.raises(SettingsError) as error:
        load(file=file)
    assert "remote_key" in str(error.value)
    assert "hidden" not in str(error.value)


def test_an_address_says_which_endpoint_is_used() -> None:
    assert ServerAddress("http://h/v1", "m", "responses").url == "http://h/v1/responses"
