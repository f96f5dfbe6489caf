"""Decodes the audio that a client appends, from base64 in the session's format to samples at the server's rate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.g711 import from_alaw, from_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.realtime.input_fields import AudioFormat

_DECODERS = {"audio/pcm": from_pcm16, "audio/pcmu": from_ulaw, "audio/pcma": from_alaw}


# Decodes base64 audio in the given format to float32 [num_samples] at the format's rate. The last argument is the path
# of the field with the audio. Raises RemoteProtocolError.
DecodeAudio = Callable[[str, AudioFormat, str], Pcm]


class AudioBuffer:
    """Decodes the audio of one client as a single stream. `feed` holds back a few samples, which `flush` returns.

    `decode`: the decoder for the formats of a dialect. Samples are float32 [num_samples] at 16 kHz.
    """

    def __init__(self, audio_format: AudioFormat, decode: DecodeAudio) -> None:
        self._decode = decode
        self.set_format(audio_format)

    def set_format(self, audio_format: AudioFormat) -> None:
        """Set the format of later audio. Drops held-back audio, so call `flush` first."""
        self.format = audio_format
        self._resampler = Resampler(audio_format.rate_hz, SAMPLE_RATE_HZ)

    def change_format(self, audio_format: AudioFormat) -> Pcm:
        """Set the format of later audio. Returns the samples that were held back in the previous format.

        No-op if the format is the same.
        """
        if audio_format == self.format:
            return np.zeros(0, np.float32)
        held_back = self.flush()
        self.set_format(audio_format)
        return held_back

    def feed(self, text: str) -> Pcm:
        """Return the samples of one append. Raises RemoteProtocolError for invalid audio."""
        return self.resampled(self.decoded(text))

    def decoded(self, text: str) -> Pcm:
        """Return the samples of one append at the format's rate. Raises RemoteProtocolError for invalid audio."""
        return self._decode(text, self.format, "audio")

    def resampled(self, pcm: Pcm) -> Pcm:
        """Return the samples at the server's rate that further ones at the format's rate complete."""
        return self._resampler.feed(pcm)

    def flush(self) -> Pcm:
        """Return the samples that were held back."""
        return self._resampler.flush()

    def whole(self, text: str, param: str) -> Pcm:
        """Return all samples of a separate recording that is not part of the stream. Raises RemoteProtocolError."""
        resampler = Resampler(self.format.rate_hz, SAMPLE_RATE_HZ)
        return np.concatenate((resampler.feed(self._decode(text, self.format, param)), resampler.flush()))


def openai_audio(max_bytes: int) -> DecodeAudio:
    """Return a decoder for OpenAI's formats, PCM16 and G.711. `max_bytes`: maximum decoded size of one append."""

    def decode(text: str, audio_format: AudioFormat, param: str) -> Pcm:
        try:
            data = decode_base64(text)
        except ValueError:
            raise RemoteProtocolError(
                "invalid_value", "Invalid 'audio'. Expected base64-encoded audio bytes.", param
            ) from None
        if len(data) > max_bytes:
            raise RemoteProtocolError(
                "invalid_value", f"Invalid 'audio': {len(data)} bytes are more than {max_bytes}.", param
            )
        if audio_format.type == "audio/pcm" and len(data) % 2:
            raise RemoteProtocolError("invalid_value", "Invalid 'audio': an odd number of bytes is not PCM16.", param)
        return _DECODERS[audio_format.type](data)

    return decode


def appended(pcm: Pcm) -> list[AppendAudio]:
    """Return a list with the command that appends these samples; [] if there are none."""
    return [AppendAudio(pcm)] if len(pcm) else []
