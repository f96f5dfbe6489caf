"""Builds the synthesizer that another server runs, from the settings."""

from __future__ import annotations

import asyncio
import logging

from antiphon.errors import RemoteError
from antiphon.remote.chat.address import ServerAddress, read_key
from antiphon.remote.chat.client import Timeouts
from antiphon.remote.speech.rest import RestSpeech
from antiphon.remote.speech.sound import SampleFormat
from antiphon.remote.speech.synthesizer import RemoteSynthesizer
from antiphon.remote.speech.voices import ServerVoices, ask_voices
from antiphon.settings import Settings

log = logging.getLogger(__name__)

# The endpoint of speech, after the base URL of the API.
PATH = "/audio/speech"


def remote_voice(address: ServerAddress, settings: Settings) -> RemoteSynthesizer:
    """Return the synthesizer at an address, after asking the server for its voices, which takes up to some seconds.

    A server that does not answer yet is logged and is not an error. Raises ModelError if the server does not accept the
    key, or has no voice that the settings name.
    """
    speech, remote, key = settings.speech, settings.remote, read_key(settings.remote)
    base_url = address.base_url.removesuffix(PATH)
    try:
        listed, is_there = asyncio.run(ask_voices(base_url, key)), True
    except RemoteError as error:
        log.warning("%s does not list its voices: %s", base_url, error)
        listed, is_there = ServerVoices(), False
    if listed.models and address.model not in listed.models:
        log.warning("%s has no model %s; it has %s", base_url, address.model, ", ".join(listed.models[:20]))
    raw = SampleFormat(speech.synthesizer_rate)
    return RemoteSynthesizer(
        RestSpeech(base_url + PATH, key, address.model, speech.synthesizer_format, raw),
        address.model,
        speech.synthesizer_rate,
        Timeouts(remote.remote_first_token_s, remote.remote_token_s),
        listed,
        speech.voices,
        is_there=is_there,
    )
