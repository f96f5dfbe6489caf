"""Words to audio: a Llama decoder turns a unit's words into 25 codes a second, and token2wav turns codes into audio.

The code decoder reads each word and the hidden state that it was chosen from. It runs on its own engine. A session's KV
holds one turn, and the turns of all conversations share the engine's steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from antiphon.adapters.minicpmo.sampling import GREEDY_TEMPERATURE, CodeChooser, UnitSampling
from antiphon.audio import Pcm
from antiphon.engine.api import Sampling, Session
from antiphon.engine.local.device_sampling import RandomNumbers
from antiphon.engine.local.streams import used_here
from antiphon.modeling.gathered import GatheredCalls

# Codes of one unit.
UNIT_CODES = 25
SAMPLE_RATE_HZ = 24_000
# Each turn of token2wav begins with three codes of silence, as in the released code.
SILENCE_CODES = (4218,) * 3
# Maximum and minimum number of codes in one call of token2wav, without the lookahead.
WINDOW_CODES, MIN_WINDOW_CODES = 25, 5


class TextConditions(nn.Module):
    """Embeds words for the code decoder: each token's embedding plus its hidden state, projected and normalized.

    Parameters have their names in the checkpoint.
    """

    def __init__(self, num_tokens: int, hidden_width: int, width: int, bos: int) -> None:
        """`hidden_width`: the language model's width. `width`: the code decoder's.

        `bos`: the token that asks for codes.
        """
        super().__init__()
        self.emb_text = nn.Embedding(num_tokens, width)
        self.projector_semantic = nn.ModuleDict(
            {"linear1": nn.Linear(hidden_width, width), "linear2": nn.Linear(width, width)}
        )
        self._bos = bos

    @torch.inference_mode()
    def forward(self, units: Sequence[UnitWords]) -> Sequence[torch.Tensor]:
        """Return the input rows [num_words + 1, width] of each unit. The last row asks for codes.

        The units are computed together, so the number of operators does not depend on their number.
        """
        like = self.emb_text.weight
        tokens = [token for unit in units for token in (*unit.words, self._bos)]
        states = [state for unit in units for state in map(used_here, unit.hidden)]
        numbers = torch.tensor(tokens).to(like.device, non_blocking=True)
        rows: torch.Tensor = self.emb_text(numbers)
        if states:
            project = self.projector_semantic
            stacked = torch.stack(states).to(like.device, like.dtype)
            semantic = normalize(project["linear2"](torch.relu(project["linear1"](stacked))), dim=-1)
            ends = set(accumulate(len(unit.words) + 1 for unit in units))
            places = torch.tensor([i for i in range(len(tokens)) if i + 1 not in ends])
            rows.index_add_(0, places.to(like.device, non_blocking=True), semantic)
        return torch.split(rows, [len(unit.words) + 1 for unit in units])


class UnitWords(NamedTuple):
    """The words of a unit, and the hidden state [hidden_width] that each was chosen from."""

    words: Sequence[int]
    hidden: Sequence[torch.Tensor]


class CodeStream:
    """Generates the codes of one conversation. In the KV, a unit's codes follow those of the turn's earlier units.

    Owns `session`, a session of the code decoder's engine. `conditions`: the calls of TextConditions, which all
    conversations share. `end`: the code that ends a turn's audio.
    """

    def __init__(
        self,
        session: Session,
        conditions: GatheredCalls[UnitWords, torch.Tensor],
        params: UnitSampling,
        end: int,
    ) -> None:
        self._session, self._conditions = session, conditions
        self._params, self._end = params, end
        self._greedy = params.temperature <= GREEDY_TEMPERATURE
        # The codes are not sampled with the seed of the words.
        seed = None if params.seed is None else params.seed + 1
        self._random = RandomNumbers(Sampling(temperature=0.0 if self._greedy else 1.0, seed=seed))

    async def codes(self, words: Sequence[int], hidden: Sequence[torch.Tensor], *, last: bool) -> list[int]:
        """Return the codes of a unit's words: 25 for one second, or fewer in the first and the last unit of a turn.

        `hidden`: the hidden state that each word was chosen from. `last`: this unit ends the turn, and the next codes
        begin another one. Waits for the engine. Raises ModelError and EngineError.
        """
        session, params = self._session, self._params
        rows = await self._conditions.call(UnitWords(words, hidden))
        first = session.length == 0
        session.append_embeddings(rows)
        chooser = CodeChooser(
            params.voice_temperature,
            params.voice_repetition_penalty,
            min_codes=0 if last or first else UNIT_CODES + 1,
            random=self._random,
            greedy=self._greedy,
        )
        sampling = Sampling(max_tokens=UNIT_CODES + 1, stop=frozenset((self._end,)), chooser=chooser)
        codes = [token.id for token in await session.collect(sampling)]
        if last:
            self.end_turn()
        else:
            # The newest code was drawn only to see whether the audio ends. It does not belong to this unit.
            session.rollback(session.length - 1)
        return codes[:-1]

    def end_turn(self) -> None:
        """Roll back all rows of the turn, which is free. Raises EngineError while codes are being generated."""
        self._session.rollback(0)

    def close(self) -> None:
        """Close the session of the code decoder and free its KV. The shared engine stays open."""
        self._session.close()


class SoundStream(Protocol):
    """Turns the codes of one conversation into audio, turn by turn."""

    async def decode(self, codes: Sequence[int], *, last: bool) -> Pcm:
        """Return the audio of these codes, float32 [num_samples], 24 kHz.

        The codes of the lookahead yield no audio yet and must be passed again in the next call. With `last`, which ends
        the turn, all codes yield audio. Calls must not overlap. Waits for the vocoder's thread. Raises ModelError.
        """
        ...

    def end_turn(self) -> None:
        """Interrupt the turn: the next codes begin another one."""
        ...

    def close(self) -> None:
        """Free what the vocoder holds for the conversation."""
        ...


class CodeVocoder(Protocol):
    """Turns codes into audio, for all conversations."""

    @property
    def lookahead(self) -> int:
        """The lookahead: the number of codes at the end of the input that yield no audio yet."""
        ...

    @property
    def room(self) -> int:
        """The number of further streams that can be opened now."""
        ...

    async def open(self, reference: Pcm | None) -> SoundStream:
        """Return a conversation's stream in the voice of `reference`, float32 [num_samples], 16 kHz; None: the default.

        Raises Refused if there is no room for another conversation, and ModelError if the reference cannot be
        used.
        """
        ...

    def close(self) -> None:
        """Stop the vocoder's thread. Open streams fail."""
        ...


class CodeBuffer:
    """Splits the codes of a turn into windows for token2wav, each with its lookahead. Pure."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._codes: list[int] = list(SILENCE_CODES)

    def feed(self, codes: Sequence[int], *, last: bool) -> list[tuple[list[int], bool]]:
        """Take a unit's codes and return the complete windows in order, each with True if it ends the turn.

        Windows overlap by the lookahead. Remaining codes are kept for the next unit. With `last`, they become the last
        window, and the buffer is reset.
        """
        self._codes += codes
        windows = []
        while len(self._codes) >= self._lookahead + MIN_WINDOW_CODES:
            size = min(WINDOW_CODES + self._lookahead, len(self._codes))
            windows.append((self._codes[:size], False))
            del self._codes[: size - self._lookahead]
        if last:
            if self._codes:
                windows.append((self._codes, True))
            self._codes = list(SILENCE_CODES)
        return windows


class SpeechDecoder:
    """One conversation's voice: turns words into codes, and codes into audio. Without `sound` it computes nothing.

    Owns `codes` and `sound`. `lookahead`: see CodeVocoder.
    """

    def __init__(self, codes: CodeStream, sound: SoundStream | None = None, lookahead: int = 0) -> None:
        self._codes, self._sound, self._lookahead = codes, sound, lookahead
        self._buffer = CodeBuffer(lookahead)

    async def speak(self, words: Sequence[int], hidden: Sequence[torch.Tensor], *, last: bool) -> Pcm:
        """Return the audio of a unit's words, float32 [num_samples], 24 kHz: about a second, empty without `sound`.

        The audio lags behind the words by the vocoder's lookahead. `last` returns the rest and ends the turn. `hidden`:
        see CodeStream.codes. Waits for the engine and the vocoder. Raises ModelError and EngineError.
        """
        if not self._sound:
            return np.zeros(0, np.float32)
        codes = await self._codes.codes(words, hidden, last=last)
        made = [await self._sound.decode(window, last=ends) for window, ends in self._buffer.feed(codes, last=last)]
        return np.concatenate(made) if made else np.zeros(0, np.float32)

    def end_turn(self) -> None:
        """Interrupt the turn: codes without audio are dropped, and the next words begin another turn."""
        self._codes.end_turn()
        self._buffer = CodeBuffer(self._lookahead)
        if self._sound:
            self._sound.end_turn()

    def close(self) -> None:
        """Close both streams and free what they hold. The shared vocoder stays open."""
        self._codes.close()
        if self._sound:
            self._sound.close()
