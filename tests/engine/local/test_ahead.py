"""One step ahead: the same tokens and the same committed rows as without, whatever the sessions do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.adapters.minicpmo.sampling import CodeChooser
from antiphon.engine.api import EngineSettings, Finish, Sampling, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.device_sampling import RandomNumbers
from antiphon.engine.local.kv.cache import PAGE_ROWS, KvCache
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.scheduler import Scheduler
from antiphon.engine.local.step import ScheduledSession, StepLimits
from antiphon.engine.local.steps import Steps
from antiphon.errors import Refused
from tests.engine.local import tiny
from tests.engine.local.tiny import VOCABULARY

torch.set_num_threads(1)
# Bytes of a page of the tiny decoder's KV.
PAGE_BYTES = PAGE_ROWS * 3 * 2 * 2 * 16 * 4
CONTEXT = 150
LAYOUTS: dict[str, dict[str, Any]] = {
    "session": {"kv_layout": "session"},
    "paged": {"kv_layout": "paged"},
    "bucketed": {"kv_layout": "paged", "decode_shapes": "bucketed"},
}


class Alternating:
    """A grammar: after an even token comes an odd one."""

    def __init__(self) -> None:
        self._odd = False

    def allowed(self) -> Any:
        words = np.zeros(-(-VOCABULARY // 32), np.uint32)
        for token in range(int(self._odd), VOCABULARY, 2):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token: int) -> None:
        if token % 2 != self._odd:
            raise ValueError
        self._odd = not self._odd


@dataclass
class Counting:
    """A chooser that shifts the likeliest token by the number of tokens so far."""

    chosen: list[int] = field(default_factory=list)

    @staticmethod
    def choose(choosers: Sequence[Counting], logits: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(1) + torch.tensor([len(c.chosen) for c in choosers])) % logits.shape[1]

    def accept(self, chosen: int) -> int:
        self.chosen.append(chosen)
        return chosen


# Ways to sample, each for one generation.
WAYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda seed: {"logprobs": seed % 2 == 0},
    "drawn": lambda seed: {"temperature": 1.4, "seed": seed},
    "top": lambda seed: {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "seed": seed, "forbid": (3, 4)},
    "repetition": lambda seed: {"temperature": 0.8, "seed": seed, "repetition_penalty": 1.5, "repetition_window": 6},
    "presence": lambda seed: {"presence_penalty": 2.0, "frequency_penalty": 0.5},
    "chooser": lambda seed: {"chooser": Counting()},
    "codes": lambda seed: {
        "chooser": CodeChooser(0.9, 1.3, seed % 4, RandomNumbers(Sampling(temperature=1.0, seed=seed)), window=3)
    },
    "grammar": lambda seed: {},
}


Script = list[tuple[str, int]]


@dataclass
class Talk:
    """One session, what it still has to do, and what it has heard."""

    name: str
    session: ScheduledSession
    script: Script
    heard: list[Any] = field(default_factory=list)
    generation: Generation | None = None
    # The generation is cancelled when this number of its tokens was heard; 0: never.
    cancel_at: int = 0


class Course:
    """Sessions that follow scripts, each at its own pace, on an engine without its thread."""

    def __init__(
        self, ahead: bool, layout: dict[str, Any], pages: int, scripts: Sequence[Script], *, shares: bool
    ) -> None:
        self.runner = Runner(tiny.model("qwen3"), rotate_half=True)
        kv = EngineSettings(kv_bytes=pages * PAGE_BYTES, step_ahead=ahead, **layout)
        self.storage = self.runner.storage(kv)
        self.cache = KvCache(self.storage, budget_bytes=kv.kv_bytes, host_bytes=PAGE_BYTES * 99)
        self.scheduler = Scheduler(
            self.cache, StepLimits(CONTEXT, decode_rows=4, prefill_rows=24, prefill_only_rows=48)
        )
        self.now_s = 0.0
        self.steps = Steps(self.scheduler, self.runner, ahead=ahead, clock=lambda: self.now_s)
        self._shares = shares
        self._scripts = [list(reversed(script)) for script in scripts]
        self.talks: list[Talk] = []

    def run(self) -> None:
        """Run until nothing is left to do."""
        stepped = True
        while self._scripts or stepped or any(map(self._has_more, self.talks)):
            if self._scripts and self.now_s % 3 == 0:
                self._open()
            for talk in self.talks:
                self._go_on(talk)
            self.now_s += 1.0
            assert self.now_s < 1000
            stepped = self.steps.run()
            self.scheduler.check_integrity()
            assert not any(talk.session.failure for talk in self.talks)

    def _open(self) -> None:
        number = len(self._scripts)
        with suppress(Refused):
            session = self.scheduler.open(PAGE_ROWS, self.now_s, f"owner {number % 2}" if self._shares else None)
            self.talks.append(Talk(str(number), session, self._scripts.pop()))

    @staticmethod
    def _has_more(talk: Talk) -> bool:
        return bool(talk.script or talk.generation or talk.session.rows.pending > 1)

    def _go_on(self, talk: Talk) -> None:
        generation, session = talk.generation, talk.session
        if generation:
            if talk.cancel_at and generation.delivered >= talk.cancel_at:
                talk.generation = None
                self.scheduler.cancel(session, generation, talk.cancel_at)
            return
        if session.stalled:
            self.scheduler.rollback(session, session.rows.length - 1)
        # Most requests come to a session that has no work; those after "soon" do not wait for that.
        soon = talk.heard and talk.heard[-1] == "soon"
        if soon or not session.rows.busy:
            if session.rows.pending > 1 and not soon:
                # Two rows may be left for the next pass. What an eviction leaves would depend on them.
                self.scheduler.settle(session, lambda _: None)
            elif talk.script:
                name, number = talk.script.pop()
                talk.heard.append(name)
                getattr(self, name)(talk, random.Random(number))

    def soon(self, talk: Talk, seed: random.Random) -> None:
        pass

    def append(self, talk: Talk, seed: random.Random) -> None:
        rows = list(range(40)) if seed.random() < 0.3 else []
        self.scheduler.append(
            talk.session, [*rows, *(seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 60)))]
        )

    def places(self, talk: Talk, seed: random.Random) -> None:
        self.scheduler.append(talk.session, [7, 8, 9], [(0,), (0,), (2,)])

    def bad(self, talk: Talk, seed: random.Random) -> None:
        self.scheduler.append_embeddings(talk.session, torch.full((1, tiny.WIDTH), torch.nan), None, None)
        self._generate(talk, Sampling(max_tokens=4))

    def rollback(self, talk: Talk, seed: random.Random) -> None:
        rows = talk.session.rows
        first = rows.pinned + rows.dropped + 1 if rows.dropped else 0
        if rows.length > first:
            self.scheduler.rollback(talk.session, seed.randrange(first, rows.length))

    def evict(self, talk: Talk, seed: random.Random) -> None:
        count = len(talk.session.rows.ids) - 4
        if count > 0 and not talk.session.rows.busy:
            self.scheduler.evict(talk.session, seed.randrange(1, min(count, 12) + 1))

    def park(self, talk: Talk, seed: random.Random) -> None:
        if not talk.session.rows.busy:
            self.cache.park(talk.session.lease, talk.session.rows.computed)

    def fork(self, talk: Talk, seed: random.Random) -> None:
        with suppress(Refused):
            twin = self.scheduler.fork(talk.session, self.now_s)
            script = [("generate", seed.randrange(99))]
            self.talks.append(Talk(f"{talk.name} {len(talk.heard)}", twin, script))

    def generate(self, talk: Talk, seed: random.Random) -> None:
        way, last = seed.choice(sorted(WAYS)), seed.randrange(1, 12)
        stop = frozenset(seed.sample(range(VOCABULARY), seed.choice((0, 5, 25))))
        params = Sampling(max_tokens=last, stop=stop, **WAYS[way](seed.randrange(99)))
        talk.cancel_at = seed.randrange(1, 6) if seed.random() < 0.3 else 0
        self._generate(talk, params, Alternating() if way == "grammar" else None)

    def _generate(self, talk: Talk, params: Sampling, constraint: Any = None) -> None:
        if not talk.session.rows.ids:
            return
        heard: list[tuple[int, float | None]] = []

        def deliver(tokens: Sequence[Token], reason: Finish | Exception | None) -> None:
            # Only the newest generation's tokens are read, up to those that a cancellation keeps.
            heard.extend((t.id, None if t.logprob is None else round(t.logprob, 3)) for t in tokens)
            if talk.cancel_at:
                del heard[talk.cancel_at :]
            if reason is not None:
                talk.heard.append(str(reason))
                talk.generation = None

        talk.heard.append(heard)
        talk.generation = Generation(params, deliver, talk.session.rows.length, constraint=constraint)
        self.scheduler.generate(talk.session, talk.generation)

    def end(self) -> None:
        """Close all sessions, after which no memory may be held."""
        for talk in self.talks:
            self.scheduler.close(talk.session, keep=False)
        assert (self.cache.held_pages, self.cache.claimed_pages) == (0, 0)
        if isinstance(self.storage, PagePool):
            self.storage.check_integrity([])


OPERATIONS = ["append", "bad", "evict", "generate", "park", "places", "rollback", "soon"]
OPERATION = st.tuples(st.sampled_from([*OPERATIONS, "append", *["generate"] * 5]), st.integers(0, 10_000))
SCRIPTS = st.lists(st.lists(OPERATION, max_size=8), min_size=1, max_size=6)
FORKS = st.lists(
    st.lists(OPERATION | st.tuples(st.just("fork"), st.integers(0, 99)), max_size=8), min_size=1, max_size=6
)
drawn = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def finished(scripts: Sequence[Script], layout: str, pages: int, *, shares: bool) -> list[Course]:
    """The same scripts, without a step ahead and with one."""
    scripts = [[("append", number), *script] for number, script in enumerate(scripts)]
    both = [Course(ahead, LAYOUTS[layout], pages, scripts, shares=shares) for ahead in (False, True)]
    for course in both:
        course.run()
    return both


def heard(course: Course) -> list[Any]:
    """What each session has heard, and its rows."""
    talks = sorted(course.talks, key=lambda t: t.name)
    return [[t.heard, t.session.rows.ids, t.session.rows.positions, t.session.rows.dropped] for t in talks]


def held(course: Course) -> list[Any]:
    """The rows of each session that are in the KV, and the memory that it holds."""
    leases = [(t.session.rows.computed, t.session.lease) for t in course.talks]
    return [[n, x.asleep, x.claim_pages, x.extent and x.extent.pages] for n, x in leases]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(scripts=SCRIPTS)
@drawn
def test_a_step_ahead_gives_the_same_tokens_rows_and_pages(layout: str, scripts: list[Script]) -> None:
    one, ahead = finished(scripts, layout, 200, shares=False)
    assert heard(ahead) == heard(one)
    assert held(ahead) == held(one)
    for course in (one, ahead):
        course.end()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(scripts=FORKS)
@drawn
def test_sessions_that_share_their_kv_hear_the_same(layout: str, scripts: list[Script]) -> None:
    """Which session copies a shared page depends on the order of the steps, so the pages may differ."""
    one, ahead = finished(scripts, layout, 200, shares=True)
    assert heard(ahead) == heard(one)
    for course in (one, ahead):
        course.end()


@pytest.mark.parametrize("layout", ["session", "paged"])
@given(scripts=FORKS)
@drawn
def test_when_room_is_short_every_session_still_ends(layout: str, scripts: list[Script]) -> None:
    """Whose context is cut depends on the order of the steps, so the tokens may differ."""
    scripts = [[("append", number), ("append", 1), *script] for number, script in enumerate(scripts)]
    course = Course(True, LAYOUTS[layout], 6, scripts, shares=True)
    course.run()
    course.end()
