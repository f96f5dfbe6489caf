"""Removes from recordings the numbers and e-mail addresses that people said, or all their words.

If texts are redacted, the recorder writes silence for the audio. The recording still shows when each side spoke, and
how long everything took. Any text that is not a known word of the protocol counts as speech, so an unknown event is
redacted rather than kept. The same applies to values that a client chose. An id is kept if the server generated it, and
is otherwise replaced by a hash, so that equal ids can still be recognized.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

# The amount of redaction: "off" removes nothing, "mask" numbers and e-mail addresses, "drop" every text.
Redaction = Literal["off", "mask", "drop"]
# Fields with credentials. Recordings contain only their hashes, redacted or not.
SECRETS = frozenset({"resume_token", "token", "api_key", "client_secret", "authorization", "credential"})
# Fields whose strings are words of the protocols, not of people.
_PROTOCOL = frozenset(
    {
        *("type", "object", "event", "status", "role", "code", "reason", "how", "format"),
        *("language", "modality", "modalities", "output_modalities", "tool_choice", "overlap", "phase", "state"),
        *("eagerness", "truncation", "dialect", "kind", "finish_reason", "intent", "path", "mode"),
    }
)
# Fields whose strings are names, either known to the server or invented by a client.
_NAMES = frozenset({"model", "voice", "speaker_label", "known_speaker_names"})
_WORD_OF_A_PROTOCOL = re.compile(r"[A-Za-z0-9_./:-]{0,80}")
# Words of the protocols that contain digits.
_WORDS = frozenset({"pcm16", "g711_ulaw", "g711_alaw", "default"})
# Ids as the server generates them (protocols/wire.py), and the id of the beginning of a conversation.
_OWN_ID = re.compile(r"[a-z]{1,16}[_-][0-9a-f]{20}|root|")
_HASH = re.compile(r"sha256:[0-9a-f]{16}|")
# An index in the path of a field.
_INDEX = re.compile(r"\[\d{1,4}\]")
# Within the values of these fields, a client chooses all names, even in the server's messages.
_FREE = frozenset({"parameters", "schema", "json_schema", "properties", "extra_params", "prompt", "tracing"})
# Text that arrives in pieces. Two pieces may split a number so that neither part looks like a number.
_PIECES = frozenset({"delta", "partial", "unreadable"})
# Lists of parts of a text, which would reveal the text, and objects whose names and values the client chose.
_LEFT_OUT = frozenset({"words", "logprobs", "bytes", "tokens", "metadata", "extra_body"})
# Sound and images in base64 contain no white space. Text longer than MAX_TEXT_CHARS is removed.
_BASE64 = re.compile(r"data:.*|[A-Za-z0-9+/_=-]{64,}", re.DOTALL)
MAX_TEXT_CHARS = 100_000
_DIGIT = r"(?:zero|oh|one|two|three|four|five|six|seven|eight|nine|double|triple)"
# The repetitions are bounded, so that matching takes time in proportion to the length of the text.
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"
    r"|\b\w[\w+-]{0,63}(?:\s{1,4}dot\s{1,4}\w{1,63}){0,8}"
    r"\s{1,4}at\s{1,4}[\w-]{1,63}(?:\s{1,4}dot\s{1,4}\w{1,63}){1,8}\b",
    re.IGNORECASE,
)
# Digits with separators inside a number, or three or more digits that are spelled out.
_NUMBER = re.compile(
    rf"[+(]{{0,3}}\d(?:[\s().,:/-]{{0,8}}\d)*|\b{_DIGIT}(?:[\s,.-]{{1,4}}{_DIGIT}){{2,}}\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redacts JSON values as `redaction` says.

    - `fields`: the names of the protocols' fields, and whether each may hold a number.
    - `names`: the names of the server's models and voices.

    The key of the hashes is discarded with the redactor, so that a guessed id cannot be confirmed.
    """

    redaction: Redaction
    fields: Mapping[str, bool] = field(default_factory=dict)
    names: Collection[str] = ()
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def redacted(self, value: object, *, by_client: bool = False) -> object:
        """Return a redacted copy of a JSON value. `by_client`: a client wrote it."""
        return value if self.redaction == "off" else self._value(value, "", by_client, is_free=False)

    def _value(self, value: object, key: str, by_client: bool, *, is_free: bool) -> object:
        is_left_out = key in _LEFT_OUT or (is_free and self.redaction == "drop")
        match value:
            case dict() if is_left_out:
                return {}
            case list() if is_left_out:
                return []
            case dict():
                return {
                    self._name(name, by_client): self._value(
                        inner, name, by_client, is_free=is_free or self._is_free(name, by_client)
                    )
                    for name, inner in value.items()
                }
            case list():
                return [self._value(inner, key, by_client, is_free=is_free) for inner in value]
            case None | bool():
                return value
            case int() | float():
                return self._number(value, key, by_client, is_free=is_free)
            case _:
                return self._text(str(value), key, by_client, is_free=is_free)

    def _is_free(self, name: str, by_client: bool) -> bool:
        """Whether a client chooses the names below this field."""
        return name in _FREE or (by_client and name not in self.fields and name not in _LEFT_OUT)

    def _name(self, name: str, by_client: bool) -> str:
        """Return the redacted name of a property. A client may have chosen it, with a number or an address in it."""
        is_said = by_client and self.redaction == "drop"
        is_ours = name in self.fields or name in SECRETS
        return name if is_ours or (not is_said and self._is_harmless(name)) else self._hashed(name)

    def _number(self, value: float, key: str, by_client: bool, *, is_free: bool) -> object:
        if _is_id(key):
            return self._hashed(str(value))
        is_known = not by_client or self.fields.get(key, False)
        return value if is_known and not is_free else "[number]" if self.redaction == "mask" else None

    def _text(self, value: str, key: str, by_client: bool, *, is_free: bool) -> str:
        if key in SECRETS and _HASH.fullmatch(value):
            return value
        if _is_id(key):
            return value if _OWN_ID.fullmatch(value) else self._hashed(value)
        if not is_free and key in _NAMES:
            return value if not value or value in self.names or value in _WORDS else self._hashed(value)
        if not is_free and self._is_protocol(value, key, by_client):
            return value
        return "" if self.redaction == "drop" or key in _PIECES or _is_no_text(value) else masked(value)

    def _is_protocol(self, value: str, key: str, by_client: bool) -> bool:
        """Whether a text is a word of a protocol, or the path of one of its fields."""
        if key == "param":
            return {*_INDEX.sub("", value).split(".")} <= self.fields.keys()
        if key not in _PROTOCOL or not _WORD_OF_A_PROTOCOL.fullmatch(value):
            return False
        bare = value.replace("/v1/", "/")
        return not by_client or value in _WORDS or masked(bare) == bare

    def _is_harmless(self, name: str) -> bool:
        return bool(_WORD_OF_A_PROTOCOL.fullmatch(name)) and masked(name) == name

    def _hashed(self, value: str) -> str:
        digest = hmac.digest(self._key, value.encode(errors="surrogatepass"), hashlib.sha256)
        return f"sha256:{digest.hex()[:16]}"


def _is_id(key: str) -> bool:
    return key == "id" or key.endswith("_id")


def masked(text: str) -> str:
    """Return a text with each e-mail address, also a spoken one, replaced by `[email]`, and each number by `[number]`.

    Numbers are digits, and three or more English digits that are spelled out. Other numbers in words stay.
    """
    return _NUMBER.sub("[number]", _EMAIL.sub("[email]", text))


def _is_no_text(value: str) -> bool:
    return len(value) > MAX_TEXT_CHARS or bool(_BASE64.fullmatch(value))
