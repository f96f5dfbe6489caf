"""The dialect of a video stream (/v1/video/chat/stream): docs/wire/video-stream.md.

The client sends frames and audio, and asks questions about them. The server answers in text and audio. Frames are
images. They stay encoded here, and only their first bytes are checked.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.video import (
    AnswerAudioDelta,
    AnswerDone,
    AnswerSampling,
    AnswerStarted,
    AnswerTextDelta,
    AppendFrame,
    AppendVideoAudio,
    AskQuestion,
    FinishVideo,
    FrameFilterName,
    FrameInfo,
    FrameReceived,
    VideoCommand,
    VideoConfig,
    VideoEnded,
    VideoEvent,
    VideoFailed,
)
from antiphon.protocols.fields import Reader, Text, check_length, check_names, decode, seed, typed
from antiphon.protocols.model_names import check_voice
from antiphon.protocols.wire import Frame, Received, message

T = TypeVar("T")
# Error messages after a timeout, while waiting for the first message or for any other message.
CONFIG_TIMEOUT, IDLE_TIMEOUT = "Timeout waiting for session.config", "Idle timeout"
# Maximum size of an image, in characters of base64.
MAX_FRAME_CHARS = 10 << 20
# Maximum size of a message, in characters: a frame with all its fields.
MAX_MESSAGE_CHARS = MAX_FRAME_CHARS + (64 << 10)
# Limits of a frame's names and times. A longer name or a later time counts as missing. 1e15 ms are 31,000 years.
MAX_NAME_CHARS, MAX_TIMESTAMP_MS = 256, 1e15
# Maximum size of the audio in one message, in decoded bytes.
MAX_AUDIO_BYTES = 4 << 20
# First bytes of image files.
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
# The only error code in this dialect. Clients receive the message without the code.
INVALID_REQUEST = "invalid_request"


class _SamplingParams(msgspec.Struct):
    """Sampling parameters for one stage of the model, named as in vLLM's `SamplingParams`. Other fields are ignored."""

    # Maximum number of tokens in an answer.
    max_tokens: int | None = None
    # Sampling temperature in [0, 2]; 0 always takes the most likely token.
    temperature: float | None = None
    # Top-p sampling: the total probability of the tokens to sample from, in [0, 1].
    top_p: float | None = None
    # Top-k sampling: the number of most likely tokens to sample from; -1 or 0 for no limit.
    top_k: int | None = None
    # Repetition penalty in [0.01, 10]; above 1, tokens that were already used become less likely.
    repetition_penalty: float | None = None
    # Random seed.
    seed: int | None = None


class _SessionConfig(msgspec.Struct, tag="session.config"):
    """Configures the session. The older name of a field is read only if the field itself is missing."""

    # Output modalities: `text`, `audio` or both.
    modalities: tuple[Text, ...] = ("text", "audio")
    # Number of frames that the model gets with a question.
    num_frames: float | UnsetType = UNSET
    # Maximum number of frames to keep. The oldest frame is dropped first.
    max_frames: float = 50.0
    # Whether to drop a frame that resembles the last frame that was kept.
    enable_frame_filter: bool | UnsetType = UNSET
    # Measure of resemblance: `evs` or `blocks`.
    frame_filter: Text | None = None
    # Resemblance from which a frame is dropped, in [0, 1].
    frame_filter_threshold: float | UnsetType = UNSET
    # Instructions for the model.
    system_prompt: Text | None = None
    # Voice of the answers.
    voice: Text | None = None
    # Whether the audio is part of the next question.
    use_audio_in_video: bool = True
    # Maximum age of frames and notes, in seconds. Older ones are forgotten.
    max_memory_s: float | None = None
    # Sampling parameters for the model's stages. Only the first is used.
    sampling_params_list: list[_SamplingParams] | None = None
    # Older name of `num_frames`.
    num_sample_frames: msgspec.Raw | UnsetType = UNSET
    # Older name of `enable_frame_filter`.
    evs_enabled: msgspec.Raw | UnsetType = UNSET
    # Older name of `frame_filter_threshold`.
    evs_threshold: msgspec.Raw | UnsetType = UNSET


class _VideoFrame(msgspec.Struct, tag="video.frame"):
    """A frame of the video. In fields declared as `object`, a value of a wrong type counts as missing."""

    # The image in base64.
    data: str = ""
    # The client's name for the frame: a string.
    frame_id: object = None
    # Presentation time in ms.
    pts_ms: object = None
    # Presentation time at the source, in ms.
    source_pts_ms: object = None
    # Time of capture, in ms.
    capture_ts_ms: object = None
    # The client's name for the image quality: a string.
    quality_profile: object = None


class _AudioChunk(msgspec.Struct, tag="audio.chunk"):
    data: str = ""


class _VideoQuery(msgspec.Struct, tag="video.query"):
    """A question. A `text` that is not a string counts as missing, and so does a false `audio_data`."""

    text: object = None
    audio_data: object = None


class _VideoDone(msgspec.Struct, tag="video.done"):
    """Ends the client's input."""


class _Ping(msgspec.Struct, tag="ping"):
    """Checks the connection. The server answers with `pong`."""


# The messages of a client, by their `type`.
VideoMessage = _SessionConfig | _VideoFrame | _AudioChunk | _VideoQuery | _VideoDone | _Ping
_MESSAGE: Reader[VideoMessage] = Reader(VideoMessage)


class VideoDialect:
    """The dialect of one video stream, without I/O.

    `now_ms`: a monotonic clock in milliseconds. Its times are sent to the client. `whole`: an answer is sent as one
    piece of text and one piece of audio. `ga`: audio events have OpenAI's GA names instead of beta names. `voices`: the
    voices of the model; the first is the default. `strict`: voices of OpenAI's hosted service are not accepted.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        *,
        whole: bool = False,
        ga: bool = False,
        voices: Sequence[str] = (),
        strict: bool = False,
    ) -> None:
        self._now_ms = now_ms
        self._voices, self._strict = voices, strict
        self._whole = whole
        self._audio_event = "response.output_audio" if ga else "response.audio"
        self._pcm_chunks: list[bytes] = []
        self._rate_hz = 0
        # Whether a `session.config` was accepted. Before that, any error ends the connection, and the server's timeout
        # for a message is a different one.
        self.configured = False
        # Whether to close the connection after the returned frames.
        self.closing = False

    # --- from the client

    def feed(self, data: str | bytes) -> Received[VideoCommand | VideoConfig]:
        """Read one message. An invalid message only returns an error for the client; nothing is raised.

        The first returned command is the configuration. An error before that ends the connection.
        """
        try:
            return self._handle(self._read(data))
        except RemoteProtocolError as error:
            return Received(answers=[self.refuse(error.message)])

    def refuse(self, reason: str, detail: str = "") -> Frame:
        """Return an error for the client. If no configuration was accepted yet, the error ends the connection."""
        self.closing = self.closing or not self.configured
        return message(type="error", message=reason, **({"detail": detail} if detail else {}))

    def _read(self, data: str | bytes) -> VideoMessage:
        """Decode a message. Raises RemoteProtocolError unless the first message, and no other, is the configuration."""
        if self.configured and len(data) > MAX_MESSAGE_CHARS:
            raise _invalid("Frame too large")
        try:
            received = _MESSAGE.read(data)
        except RemoteProtocolError as error:
            raise self._refusal(data, error) from None
        if isinstance(received, _SessionConfig) is self.configured:
            raise self._unexpected(received.__struct_config__.tag)
        check_names(data, received)
        return received

    def _refusal(self, data: str | bytes, error: RemoteProtocolError) -> RemoteProtocolError:
        """Return the error for a message that could not be decoded. It depends on the message's `type`."""
        try:
            value = decode(data, object)
        except RemoteProtocolError:
            return _invalid("Invalid JSON" if self.configured else "Invalid JSON in session.config")
        if not isinstance(value, dict):
            no_object = "Messages must be JSON objects"
            return _invalid(no_object) if self.configured else self._unexpected(type(value).__name__)
        kind = value.get("type")
        if error.param == "type" or (kind == "session.config") is self.configured:
            return self._unexpected(kind)
        return _invalid(error.message if self.configured else f"Invalid session config: {error.message}")

    def _unexpected(self, kind: object) -> RemoteProtocolError:
        return _invalid(f"{'Unknown type:' if self.configured else 'Expected session.config, got:'} {str(kind)[:80]}")

    def _handle(self, received: VideoMessage) -> Received[VideoCommand | VideoConfig]:
        match received:
            case _SessionConfig():
                return Received([self._configure(received)])
            case _VideoFrame():
                return Received([AppendFrame(_image(received.data), self._frame_info(received))])
            case _AudioChunk(data=data):
                return Received([_audio(data)])
            case _VideoQuery(text=text, audio_data=data):
                question = AskQuestion(text if isinstance(text, str) else "")
                check_length(len(question.text), "text")
                return Received([_audio(typed(data, str, "audio_data")), question] if data else [question])
            case _VideoDone():
                return Received([FinishVideo()])
            case _Ping():
                return Received(answers=[message(type="pong")])

    def _configure(self, fields: _SessionConfig) -> VideoConfig:
        try:
            config = _config(fields)
            check_voice(config.voice, self._voices, "voice", strict=self._strict)
        except RemoteProtocolError as error:
            raise _invalid(f"Invalid session config: {error.message}") from None
        self.configured = True
        return config

    def _frame_info(self, frame: _VideoFrame) -> FrameInfo:
        name, quality = frame.frame_id, frame.quality_profile
        return FrameInfo(
            self._now_ms(),
            name if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS else None,
            _timestamp_ms(frame.pts_ms),
            _timestamp_ms(frame.source_pts_ms),
            _timestamp_ms(frame.capture_ts_ms),
            quality if isinstance(quality, str) and len(quality) <= MAX_NAME_CHARS else None,
        )

    # --- to the client

    def send(self, output: VideoEvent) -> list[Frame]:
        """Return the frames of an event. Each chunk of audio, or each answer, is a WAV file in base64."""
        match output:
            case FrameReceived(info):
                return [] if info.id is None else [_frame_ack(output)]
            case AnswerStarted(request_id, frames):
                self._pcm_chunks = []
                return [message(type="response.start"), *self._frames_consumed(request_id, frames)]
            case AnswerTextDelta(text):
                return [] if self._whole else [message(type="response.text.delta", delta=text)]
            case AnswerAudioDelta(pcm, rate_hz):
                self._rate_hz = rate_hz
                self._pcm_chunks.append(to_pcm16(pcm))
                return [] if self._whole else self._wav()
            case AnswerDone(text, has_audio):
                done = [message(type=f"{self._audio_event}.done")] if has_audio else []
                return [message(type="response.text.done", text=text), *(self._wav() if self._whole else []), *done]
            case VideoFailed(reason, detail, ends_answer, partial_text):
                ended = [message(type="response.text.done", text=partial_text)] if ends_answer else []
                return [self.refuse(reason, detail), *ended]
            case VideoEnded():
                self.closing = True
                return [message(type="session.done")]

    def _frames_consumed(self, request_id: str, frames: tuple[FrameInfo, ...]) -> list[Frame]:
        """Return the message that lists the frames of an answer; [] if none of them has an id."""
        if all(f.id is None for f in frames):
            return []
        now_ms = self._now_ms()
        return [
            message(
                type="video.frames.consumed",
                request_id=request_id,
                model_selected_ts_ms=now_ms,
                frame_ids=[f.id for f in frames if f.id is not None],
                frames=[
                    _ConsumedFrame(f.id, f.pts_ms, f.source_pts_ms, f.quality_profile, f.received_ms, now_ms)
                    for f in frames
                ],
                latest_pts_ms=frames[-1].pts_ms,
            )
        ]

    def _wav(self) -> list[Frame]:
        """Return the message with the collected audio as one WAV file; [] if there is no audio."""
        data, self._pcm_chunks = b"".join(self._pcm_chunks), []
        if not data:
            return []
        wav = wav_header(self._rate_hz, len(data)) + data
        return [message(type=f"{self._audio_event}.delta", data=b64encode(wav).decode(), format="wav")]


class _ConsumedFrame(msgspec.Struct):
    # The client's name for the frame.
    frame_id: str | None
    # Presentation time in ms.
    pts_ms: float | None
    # Presentation time at the source, in ms.
    source_pts_ms: float | None
    # The client's name for the image quality.
    quality_profile: str | None
    # Time at which the server received the frame, in ms on the server's clock.
    receiver_received_ts_ms: float
    # Time at which the frame was ready for the model, in ms on the same clock.
    decoded_ready_ts_ms: float


def _frame_ack(received: FrameReceived) -> Frame:
    info, dropped = received.info, received.dropped
    return message(
        type="video.frame.ack",
        frame_id=info.id,
        pts_ms=info.pts_ms,
        capture_ts_ms=info.capture_ts_ms,
        accepted=received.accepted,
        buffered_frames=received.buffered,
        server_receive_ts_ms=info.received_ms,
        **({"reason": received.reason} if received.reason else {}),
        **({"dropped_frame_id": dropped.id} if dropped and dropped.id is not None else {}),
    )


def _image(data: str) -> bytes:
    """Decode the base64 of a JPEG or PNG, but not the image itself. Raises RemoteProtocolError for any other data."""
    if len(data) > MAX_FRAME_CHARS:
        raise _invalid("Frame too large")
    try:
        image = decode_base64(data)
    except ValueError:
        raise _invalid("Invalid image data") from None
    if not image.startswith((JPEG, PNG)):
        raise _invalid("Invalid image data")
    return image


def _audio(data: str) -> AppendVideoAudio:
    try:
        audio = decode_base64(data)
    except ValueError:
        raise _invalid("Invalid audio data") from None
    if len(audio) > MAX_AUDIO_BYTES:
        raise _invalid("Audio buffer overflow")
    return AppendVideoAudio(from_pcm16(audio[: len(audio) // 2 * 2]))


def _config(fields: _SessionConfig) -> VideoConfig:
    """Convert the fields into a configuration, with defaults. Raises RemoteProtocolError for an invalid field."""
    if not fields.modalities or not set(fields.modalities) <= {"text", "audio"}:
        raise _invalid("modalities is a list of text and audio")
    num_frames = _either(fields.num_frames, fields.num_sample_frames, float, "num_sample_frames", 4.0)
    filters_frames = _either(fields.enable_frame_filter, fields.evs_enabled, bool, "evs_enabled", True)
    threshold = _either(fields.frame_filter_threshold, fields.evs_threshold, float, "evs_threshold", 0.95)
    chosen = _filter_name(fields.frame_filter)
    memory_s = fields.max_memory_s
    return VideoConfig(
        audio_output="audio" in fields.modalities,
        text_output="text" in fields.modalities,
        num_frames=_whole(num_frames, "num_frames", 128),
        max_frames=_whole(fields.max_frames, "max_frames", 256),
        instructions=fields.system_prompt or "",
        filter=chosen if filters_frames else None,
        threshold=_in_range(threshold, "frame_filter_threshold", 0, 1),
        uses_audio=fields.use_audio_in_video,
        voice=fields.voice,
        max_memory_s=None if memory_s is None else _in_range(memory_s, "max_memory_s", 1, 86_400),
        # The first stage generates the text. The model chooses the parameters of the other stages itself.
        sampling=_sampling(fields.sampling_params_list[0]) if fields.sampling_params_list else AnswerSampling(),
    )


def _sampling(given: _SamplingParams) -> AnswerSampling:
    top_k = given.top_k
    _check_range(given.max_tokens, "max_tokens", 1, 1 << 20)
    _check_range(given.temperature, "temperature", 0, 2)
    _check_range(given.top_p, "top_p", 0, 1)
    # In vLLM, both -1 and 0 stand for all tokens.
    _check_range(top_k, "top_k", -1, 1 << 20)
    _check_range(given.repetition_penalty, "repetition_penalty", 0.01, 10)
    return AnswerSampling(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=None if top_k is None else max(0, top_k),
        repetition_penalty=given.repetition_penalty,
        seed=seed(given.seed),
    )


def _check_range(value: float | None, name: str, least: float, most: float) -> None:
    if value is not None:
        _in_range(value, f"sampling_params_list[0].{name}", least, most)


def _either(value: T | UnsetType, older: msgspec.Raw | UnsetType, kind: type[T], older_name: str, default: T) -> T:
    """Return the value of a field. The field's older name is read only if the field is missing."""
    if not isinstance(value, UnsetType):
        return value
    return default if isinstance(older, UnsetType) else decode(older, kind, older_name)


def _filter_name(name: str | None) -> FrameFilterName:
    match name:
        case None:
            return "evs"
        case "evs" | "blocks":
            return name
        case _:
            raise _invalid("frame_filter is evs or blocks")


def _whole(value: float, name: str, most: int) -> int:
    """Return a whole number from 1 to `most`. JSON may write it as a float, such as 4.0."""
    if value != int(value):
        raise _invalid(f"{name} is a whole number")
    return int(_in_range(value, name, 1, most))


def _in_range(value: float, name: str, least: float, most: float) -> float:
    if not least <= value <= most:
        raise _invalid(f"{name} is from {least} to {most}")
    return value


def _timestamp_ms(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MAX_TIMESTAMP_MS else None


def _invalid(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(INVALID_REQUEST, reason)
