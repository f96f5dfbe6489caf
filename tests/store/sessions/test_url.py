"""URLs of stores: their form in messages, and invalid ones."""

from __future__ import annotations

import pytest

from antiphon.errors import SettingsError
from antiphon.store.sessions.url import StoreUrl, is_store_url

URLS = {
    "redis://:pa55word@127.0.0.1:6379/3": "redis://127.0.0.1:6379/3",
    "rediss://user:pa55word@store.example.org/0?ssl_cert_reqs=pa55word": "rediss://store.example.org/0",
    "valkey://:pa55word@[::1]:6379": "valkey://[::1]:6379",
    "postgresql://user:pa55word@db.example.org:5432/app?password=pa55word": "postgresql://db.example.org:5432/app",
    "postgresql:///app?password=pa55word": "postgresql:///app",
}


@pytest.mark.parametrize("text", URLS)
def test_when_a_url_is_shown_then_its_secrets_are_not(text: str) -> None:
    url = StoreUrl(text)
    assert url.shown == URLS[text]
    assert "pa55word" not in repr(url) + str(url) + url.shown
    assert "pa55word" not in url.hidden(f"no connection to {text}: pa55word is wrong")


def test_when_a_password_is_quoted_then_neither_form_is_shown() -> None:
    url = StoreUrl("redis://:p%40ss%2Fword@host/0")
    assert url.hidden("p@ss/word or p%40ss%2Fword") == "*** or ***"


def test_when_a_client_library_takes_the_url_then_valkey_has_the_name_of_redis() -> None:
    assert StoreUrl("valkeys://:x@host:1/0").of_client == "rediss://:x@host:1/0"
    assert StoreUrl("postgresql://u:x@host/a").of_client == "postgresql://u:x@host/a"


@pytest.mark.parametrize("text", ["mysql://u:pa55word@h/x", "redis://:pa55word@h:port/0", "redis://u:pa55/word@h:1/0"])
def test_when_it_is_no_url_of_a_store_then_it_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(SettingsError, match="--state") as caught:
        StoreUrl(text)
    assert "pa55" not in str(caught.value)


def test_when_the_setting_is_a_folder_then_it_is_no_url() -> None:
    assert not is_store_url("/var/lib/antiphon")
    assert not is_store_url("~/state")
    assert is_store_url("redis://host")


@pytest.mark.parametrize("text", ["redis://store:1/0", "postgresql://store:1/x?password=abcd"])
def test_an_address_without_a_user_is_no_secret(text: str) -> None:
    url = StoreUrl(text)
    assert url.hidden("Error 111 connecting to store:1.") == "Error 111 connecting to store:1."
    assert "abcd" not in url.hidden(f"{text} is wrong")
