"""Codes to audio for all conversations: windows that wait at the same time share a call of each network.

The networks run in a thread of their own. On a GPU, all windows that wait are computed together. On a CPU they are
computed one by one, because a joint call would delay the first of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from antiphon.adapters.minicpmo.token2wav.calls import WindowCalls
from antiphon.adapters.minicpmo.token2wav.files import load_weights, read_flow_config, read_part, read_weights
from antiphon.adapters.minicpmo.token2wav.flow import CodeWindow, Flow, FlowSlots
from antiphon.adapters.minicpmo.token2wav.hift import CausalHift, WindowHift, load_hift
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from antiphon.adapters.minicpmo.token2wav.voice import PromptVoice, VoiceReader
from antiphon.audio import Pcm
from antiphon.audio.containers import decode
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import MediaError, ModelError, Refused
from antiphon.modeling.gathered import GatheredCalls
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.places import current_owner
from antiphon.shares.threads import FILE_THREADS, in_thread

log = logging.getLogger(__name__)

# Paths in the checkpoint's folder: the weights, and the default voice.
WEIGHTS = "assets/token2wav"
DEFAULT_VOICE = "assets/HT_ref_audio.wav"
# Limit of cached voices. A conversation keeps its own voice even if the cache evicts it.
MAX_VOICES = 16
# Limit of slots, because each takes up to 860 MB.
MAX_SLOTS = 64
# For a conversation that finds no free slot: the time after which its client may try again.
RETRY_S = 5.0


def load(folder: Path, device: torch.device, sessions: int, *, num_steps: int, graphs: bool) -> Token2Wav | None:
    """Load token2wav from a checkpoint's folder onto a device, for `sessions` conversations. Takes several seconds.

    `num_steps`: the number of the flow's Euler steps. `graphs`: calls are captured on a GPU. Returns None and logs a
    warning if the folder has no token2wav. Raises ModelError, which names the file, if a file is missing or damaged.
    """
    where = folder / WEIGHTS
    if not where.is_dir():
        log.warning("%s has no %s: speech is text only", folder, WEIGHTS)
        return None
    slots = min(sessions, MAX_SLOTS)
    made = Token2Wav(
        WindowCalls(
            FlowSlots(read_flow(where, device), slots, num_steps=num_steps),
            HiftSlots(read_hift(where, device), slots),
            captures=graphs,
        ),
        VoiceReader(where).read,
        _default(folder / DEFAULT_VOICE),
    )
    if graphs and device.type == "cuda":
        made.windows.warm()
    return made


def _default(path: Path) -> Pcm | None:
    if not path.is_file():
        return None
    try:
        return np.concatenate([*decode(str(path)), np.zeros(0, np.float32)])
    except MediaError as error:
        raise ModelError(f"{path}: {error}") from error


def read_flow(folder: Path, device: torch.device) -> Flow:
    """Load the flow of a folder onto a device, in float32. Raises ModelError, which names the file."""
    flow = Flow(read_flow_config(folder / "flow.yaml"))
    load_weights(flow, read_weights(folder / "flow.pt"), folder / "flow.pt")
    return flow.to(device, torch.float32).eval().requires_grad_(False)


def read_hift(folder: Path, device: torch.device) -> CausalHift | WindowHift:
    """Load the vocoder of a folder onto a device, in float32. Raises ModelError, which names the file.

    A folder with config.yaml has the causal vocoder (minicpmo-utils 1.0.7), others have the one before it.
    """
    config, path = folder / "config.yaml", folder / "hift.pt"
    causal = config.is_file()
    fields = read_part(config, "hift") if causal else {}
    try:
        return load_hift(read_weights(path), fields, device, causal=causal)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


class Token2WavStream:
    """A conversation's stream, which owns a slot. A turn's first window begins it again in the voice."""

    def __init__(self, token2wav: Token2Wav, slot: int, voice: PromptVoice) -> None:
        self._token2wav, self.slot, self.voice = token2wav, slot, voice
        # The number of the current turn, and of the turn that the slot holds; -1: none.
        self._turn, self.held_turn = 0, -1
        self.closed = False

    async def decode(self, codes: Sequence[int], *, last: bool) -> Pcm:
        """See CodeStream of speech_decoder.py. Raises ModelError, after which the turn begins again."""
        turn = self._turn
        self._turn += last
        return await self._token2wav.calls.call(_Request(self, turn, CodeWindow(codes, last)))

    def end_turn(self) -> None:
        """Interrupt the turn: the next window begins another one."""
        self._turn += 1

    def close(self) -> None:
        """Free the slot. Windows that wait fail. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._token2wav.free.append(self.slot)


@dataclass(frozen=True, slots=True)
class _Request:
    """A window of a stream, of its turn with that number."""

    stream: Token2WavStream
    turn: int
    window: CodeWindow


class Token2Wav:
    """A CodeVocoder.

    `windows`: its networks. `thread`: runs them. `read`: reads a voice from a reference, float32 [num_samples], 16 kHz,
    or raises ModelError. `free`: the slots without a stream. `default`: the default voice; None: there is none.
    """

    def __init__(self, windows: WindowCalls, read: Callable[[Pcm], PromptVoice], default: Pcm | None = None) -> None:
        """`default`: the reference of the default voice, which is read at once."""
        self.windows, self.read = windows, read
        self.free = deque(range(windows.flow.spare))
        self.default = None if default is None else read(default)
        self._voices = FairCache[str, PromptVoice](MAX_VOICES)
        self.thread = ModelThread("token2wav")
        self.calls = GatheredCalls[_Request, Pcm](self.thread, self._serve)

    @property
    def lookahead(self) -> int:
        """The number of codes after a window that the flow needs to compute it."""
        return self.windows.flow.flow.encoder.lookahead

    @property
    def room(self) -> int:
        """The number of sessions that may still begin, each with a slot."""
        return len(self.free)

    async def open(self, reference: Pcm | None) -> Token2WavStream:
        """Return a stream in the voice of `reference`, float32 [num_samples], 16 kHz; None: the default voice.

        Waits for a thread that reads the voice, unless it is known. Raises Refused if all slots are taken, and an error
        that says why if the voice cannot be read.
        """
        try:
            slot = self.free.popleft()
        except IndexError:
            raise Refused(f"all {self.windows.flow.spare} voices of the model are taken", RETRY_S) from None
        try:
            voice = self.default if reference is None else await in_thread(self._voice, reference, places=FILE_THREADS)
            if voice is None:
                raise ModelError(f"the model has no default voice ({DEFAULT_VOICE}), and a reference is missing")
        except BaseException:
            self.free.append(slot)
            raise
        return Token2WavStream(self, slot, voice)

    def close(self) -> None:
        """Stop the thread. Windows that wait fail."""
        self.thread.close()

    def _voice(self, reference: Pcm) -> PromptVoice:
        owner, key = current_owner.get(), hashlib.sha256(np.asarray(reference, np.float32).tobytes()).hexdigest()
        voice = self._voices.get(owner, key)
        if voice is None:
            voice = self.read(reference)
            self._voices.put(owner, key, voice)
        return voice

    def _serve(self, requests: Sequence[_Request]) -> list[Pcm | ModelError]:
        made: dict[int, Pcm | ModelError] = {}
        ready = list[int]()
        for number, request in enumerate(requests):
            try:
                self._prepare(request)
                ready.append(number)
            except Exception as error:
                made[number] = _failed(request.stream, error)
        for members in [ready] if self.windows.together and ready else [[number] for number in ready]:
            streams = [requests[i].stream for i in members]
            try:
                sounds = self.windows.run([s.slot for s in streams], [requests[i].window for i in members])
            except Exception as error:
                made |= {i: _failed(stream, error) for i, stream in zip(members, streams, strict=True)}
                continue
            for i, stream, sound in zip(members, streams, sounds, strict=True):
                finite = bool(np.isfinite(sound).all())
                made[i] = sound if finite else _failed(stream, ValueError("audio is not finite"))
        return [made[number] for number in range(len(requests))]

    def _prepare(self, request: _Request) -> None:
        """Check a window, and begin its turn if it is the first one."""
        stream, flow = request.stream, self.windows.flow
        if stream.closed:
            raise ModelError("the conversation is closed")
        flow.check(request.window)
        if stream.held_turn != request.turn:
            flow.begin(stream.slot, stream.voice)
            self.windows.vocoder.begin(stream.slot)
            stream.held_turn = request.turn


def _failed(stream: Token2WavStream, error: Exception) -> ModelError:
    """Return the error for a stream's caller. The stream's next window begins its turn again."""
    stream.held_turn = -1
    failed = error if isinstance(error, ModelError) else ModelError(f"token2wav: {type(error).__name__}: {error}")
    failed.__cause__ = error.__cause__ if failed is error else error
    return failed
