"""What is spoken to sound: a Llama decoder makes 25 codes a second of the words and what the model thought saying them; token2wav makes sound.

The decoder runs on an engine of its own: its keys and values stay for as long as a turn, and the turns of all sessions share its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from antiphon.adapters.minicpmo.sampling import COLD, CodeChooser, UnitSampling
from antiphon.audio import Pcm
from antiphon.engine.api import Sampling
from antiphon.engine.local.engine import Engine, EngineSession

CODES_A_UNIT = 25
SAMPLE_RATE_HZ = 24_000
# How token2wav is begun: three codes of silence.
SILENCE = (4218,) * 3
# Codes it is given at once beside those it looks ahead, and the fewest that are worth it.
TAKEN, WORTH = 25, 5


class TextConditions(nn.Module):
    """What the code decoder is told of each word: its embedding and the decoder's thought, of length 1. Parameter names are the checkpoint's."""

    def __init__(self, tokens: int, thought: int, width: int, bos: int) -> None:
        super().__init__()
        self.emb_text = nn.Embedding(tokens, width)
        self.projector_semantic = nn.ModuleDict(
            {"linear1": nn.Linear(thought, width), "linear2": nn.Linear(width, width)}
        )
        self._bos = bos

    @torch.inference_mode()
    def forward(self, words: Sequence[int], thoughts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[words + 1, width]; thoughts [width of the decoder] each. The last row asks for codes."""
        like = self.emb_text.weight
        rows: torch.Tensor = self.emb_text(torch.tensor([*words, self._bos], device=like.device))
        if thoughts:
            project = self.projector_semantic
            thought = torch.stack(list(thoughts)).to(like.device, like.dtype)
            rows[:-1] += normalize(project["linear2"](torch.relu(project["linear1"](thought))), dim=-1)
        return rows


class CodeStream:
    """One conversation's voice: the codes of each unit follow those of the turn's earlier ones. `end`: the code that ends a sound."""

    def __init__(
        self, engine: Engine, session: EngineSession, conditions: TextConditions, manner: UnitSampling, end: int
    ) -> None:
        self._engine, self._session, self._conditions = engine, session, conditions
        self._manner, self._end = manner, end
        self._random = torch.Generator()
        if manner.seed is not None:
            self._random.manual_seed(manner.seed)

    async def codes(self, words: Sequence[int], thoughts: Sequence[torch.Tensor], *, last: bool) -> list[int]:
        """The unit's codes: a second of them, fewer where a turn begins or ends. Raises ModelError, EngineError."""
        session, manner = self._session, self._manner
        rows = await self._engine.call(lambda: self._conditions(words, thoughts))
        fresh = session.length == 0
        session.append_embeddings(rows)
        least = 0 if last or fresh else CODES_A_UNIT + 1
        chooser = CodeChooser(
            manner.voice_temperature,
            manner.voice_repetition_penalty,
            least,
            self._random,
            greedy=manner.temperature <= COLD,
        )
        sampling = Sampling(max_tokens=CODES_A_UNIT + 1, stop=frozenset((self._end,)), chooser=chooser)
        codes = [token.id async for token in session.generate(sampling)]
        if last:
            self.end_turn()
        else:
            # The newest was drawn to see whether the sound ends, and is not of this unit.
            session.rollback(session.length - 1)
        return codes[:-1]

    def end_turn(self) -> None:
        """The next codes are another turn's. Not while codes are being made."""
        self._session.rollback(0)

    def close(self) -> None:
        """Give back its memory."""
        self._session.close()


class CodeVocoder(Protocol):
    """token2wav, shared by all sessions: codes to sound with a state that each stream keeps. Called in threads."""

    @property
    def lookahead(self) -> int:
        """Codes at the end of what it is given that only help with those before them."""
        ...

    def open(self, reference: Pcm | None) -> Any:
        """The state of a new turn, speaking like `reference` (float32 [n], 16 kHz)."""
        ...

    def sound(self, state: Any, codes: Sequence[int], *, last: bool) -> tuple[Pcm, Any]:
        """float32 at 24 kHz of these codes but for those it looks ahead (`last`: of all), and the new state."""
        ...


class CodeBuffer:
    """Which codes token2wav is given when: as many as there are, with a look ahead; pure."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._codes: list[int] = list(SILENCE)

    def take(self, codes: Sequence[int], *, last: bool) -> list[tuple[list[int], bool]]:
        """The windows that a unit's codes fill, and whether each ends the turn."""
        self._codes += codes
        windows = []
        while len(self._codes) >= self._lookahead + WORTH:
            size = min(TAKEN + self._lookahead, len(self._codes))
            windows.append((self._codes[:size], False))
            del self._codes[: size - self._lookahead]
        if last:
            if self._codes:
                windows.append((self._codes, True))
            self._codes = list(SILENCE)
        return windows


class SpeechDecoder:
    """One conversation's sound: its voice's codes through the vocoder. Without one there is no sound."""

    def __init__(self, voice: CodeStream, vocoder: CodeVocoder | None, reference: Pcm | None) -> None:
        self._voice, self._vocoder, self._reference = voice, vocoder, reference
        self._begin()

    def _begin(self) -> None:
        self._state: Any = None
        if self._vocoder:
            self._buffer = CodeBuffer(self._vocoder.lookahead)
            self._fresh = True

    async def speak(self, words: Sequence[int], thoughts: Sequence[torch.Tensor], *, last: bool) -> Pcm:
        """float32 [num_samples], 24 kHz. Raises ModelError, EngineError."""
        if not self._vocoder:
            return np.zeros(0, np.float32)
        if self._fresh:
            self._state, self._fresh = await asyncio.to_thread(self._vocoder.open, self._reference), False
        codes = await self._voice.codes(words, thoughts, last=last)
        made = []
        for window, ends in self._buffer.take(codes, last=last):
            pcm, self._state = await asyncio.to_thread(self._vocoder.sound, self._state, window, last=ends)
            made.append(pcm)
        if last:
            self._begin()
        return np.concatenate(made) if made else np.zeros(0, np.float32)

    def end_turn(self) -> None:
        """What was being said is over."""
        self._voice.end_turn()
        self._begin()

    def close(self) -> None:
        """End it."""
        self._voice.close()
