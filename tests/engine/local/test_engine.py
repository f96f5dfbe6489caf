"""The engine against a full forward of the same rows: the logits agree after any operations on any sessions."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from antiphon.engine.api import EngineSettings, Sampling
from antiphon.engine.local.engine import LocalEngine, LocalSession
from antiphon.engine.local.runner import Runner
from antiphon.errors import EngineError, ModelError, Refused
from antiphon.modeling.text_decoder import TextDecoder
from tests.engine.local import tiny
from tests.engine.local.tiny import FAMILIES, VOCABULARY, Embedded, Shadow

torch.set_num_threads(1)
ROW_BYTES = 3 * 2 * 2 * 16 * 4


def engine(family: str, **options: Any) -> LocalEngine:
    return LocalEngine(
        Runner(tiny.model(family)), EngineSettings(**{"kv_bytes": 4 << 20, "reserve_rows": 64} | options)
    )


async def integrity(e: LocalEngine) -> None:
    await e.thread.call(e.scheduler.check_integrity)


async def tokens(session: LocalSession, count: int, **options: Any) -> list[int]:
    return [t.id async for t in session.generate(Sampling(max_tokens=count, **options))]


def greedy(reference: Any, rows: Shadow, count: int) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(tiny.logits(reference, [*rows, *out])[-1].argmax()))
    return out


class Driver:
    """Sessions of one engine, each with a shadow list of its rows, and the operations on them."""

    def __init__(self, family: str, e: LocalEngine) -> None:
        self.reference = tiny.model(family)
        self.engine = e
        self.live: list[tuple[LocalSession, Shadow]] = []

    async def open(self, seed: random.Random) -> None:
        # Half of them begin alike, like conversations with the same system prompt.
        session = await self.engine.open()
        rows: Shadow = [i % VOCABULARY for i in range(24)] if seed.random() < 0.5 else []
        rows += [seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 90))]
        session.append([r for r in rows if isinstance(r, int)])
        self.live.append((session, rows))

    async def append(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        more = [seed.randrange(VOCABULARY) for _ in range(seed.randrange(1, 40))]
        session.append(more)
        rows += more

    async def embed(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        more = torch.randn(
            seed.randrange(1, 6), tiny.WIDTH, generator=torch.Generator().manual_seed(seed.randrange(99))
        )
        session.append_embeddings(more)
        rows += [Embedded(tuple(row.tolist())) for row in more]

    async def rollback(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        position = seed.randrange(1, len(rows) + 1)
        session.rollback(position)
        del rows[position:]

    async def fork(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        self.live.append((await session.fork(), list(rows)))

    async def park(self, seed: random.Random) -> None:
        session, _ = seed.choice(self.live)
        await session.settle()
        seat = session.scheduled
        await self.engine.thread.call(lambda: self.engine.scheduler.cache.park(seat.lease, seat.rows.computed))

    async def close(self, seed: random.Random) -> None:
        if len(self.live) > 1:
            session, _ = self.live.pop(seed.randrange(len(self.live)))
            session.close(keep=seed.random() < 0.5)

    async def cancel(self, seed: random.Random) -> None:
        session, rows = seed.choice(self.live)
        wanted = seed.randrange(4)
        async with aclosing(session.generate(Sampling(max_tokens=50))) as stream:
            for _ in range(wanted):
                rows.append((await anext(stream)).id)
        assert session.length == len(rows)

    async def generate(self, seed: random.Random) -> None:
        """Generate in several sessions at once, and compare each token's logits with a full forward."""
        chosen = seed.sample(self.live, seed.randrange(1, len(self.live) + 1))
        options = [{"temperature": 0.0}, {"temperature": 1.3, "seed": 5}, {"temperature": 0.8, "top_k": 9, "seed": 6}]
        await asyncio.gather(*(self.generate_checked(s, rows, seed.choice(options)) for s, rows in chosen))

    async def generate_checked(self, session: LocalSession, rows: Shadow, options: dict[str, Any]) -> None:
        start, seen = len(rows), []
        async for token in session.generate(Sampling(max_tokens=5, hidden=True, **options)):
            rows.append(token.id)
            seen.append(token.hidden)
        expected = tiny.logits(self.reference, rows)[start - 1 : -1]
        got = tiny.head(self.reference, torch.stack(seen))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        if not options["temperature"]:
            assert rows[start:] == expected.argmax(-1).tolist()


OPERATIONS: dict[str, Callable[[Driver, random.Random], Awaitable[None]]] = {
    "open": Driver.open,
    "append": Driver.append,
    "embed": Driver.embed,
    "rollback": Driver.rollback,
    "fork": Driver.fork,
    "park": Driver.park,
    "close": Driver.close,
    "cancel": Driver.cancel,
    "generate": Driver.generate,
}


async def run(family: str, plan: list[tuple[str, int]], **options: Any) -> None:
    e = engine(family, **options)
    try:
        driver = Driver(family, e)
        await driver.open(random.Random(0))
        for name, number in plan:
            if name in ("open", "fork") and len(driver.live) >= 5:
                continue
            await OPERATIONS[name](driver, random.Random(number))
            await integrity(e)
        for session, rows in driver.live:
            await driver.generate_checked(session, rows, {"temperature": 0.0})
        for session, _ in driver.live:
            session.close()
        await integrity(e)
        assert (await e.state()).sessions == 0
    finally:
        e.close()


# The combinations of a KV layout and shapes of decode steps.
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"kv_layout": "paged"},
    {"kv_layout": "paged", "decode_shapes": "bucketed"},
]
PLANS = st.lists(st.tuples(st.sampled_from([*OPERATIONS, "generate"]), st.integers(0, 10_000)), max_size=25)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
@pytest.mark.parametrize("family", FAMILIES)
@given(plan=PLANS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_interleaving_equals_a_full_forward(
    family: str, layout: dict[str, Any], plan: list[tuple[str, int]]
) -> None:
    asyncio.run(run(family, plan, **layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
@given(plan=PLANS)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_interleaving_equals_a_full_forward_when_room_is_short(
    layout: dict[str, Any], plan: list[tuple[str, int]]
) -> None:
    """With room for twelve pages and parking on disk, sessions constantly evict each other."""
    plan = [(n, s) for n, s in plan if n != "fork"]
    try:
        asyncio.run(run("qwen2", plan, kv_bytes=12 * 64 * ROW_BYTES, host_bytes=0, disk_bytes=1 << 24, **layout))
    except Refused:
        # A refusal for lack of room is a correct result.
        return


def test_a_cut_context_equals_a_full_forward_of_what_stayed() -> None:
    async def main() -> None:
        e = engine("qwen3", context_rows=128)
        reference = tiny.model("qwen3")
        session = await e.open()
        seed = random.Random(3)
        session.append([1, 2, 3, 4, 5])
        session.pin()
        for _ in range(9):
            session.start_turn()
            session.append([seed.randrange(VOCABULARY) for _ in range(17)])
            async for token in session.generate(Sampling(max_tokens=3, hidden=True)):
                rows, dropped = await e.thread.call(
                    lambda: (list(session.scheduled.rows.ids), session.scheduled.rows.dropped)
                )
                # A token is sampled from the rows before it, not from itself or later ones.
                upto = rows[: session.length - 1 - dropped]
                expected = tiny.logits(reference, upto)[-1]  # type: ignore[arg-type]
                torch.testing.assert_close(tiny.head(reference, token.hidden), expected, atol=1e-4, rtol=1e-4)
        assert rows[:5] == [1, 2, 3, 4, 5]
        assert session.length == 5 + 9 * 20
        assert len(rows) < 128
        assert e.scheduler.context_cuts >= 1
        e.close()

    asyncio.run(main())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_when_rows_are_evicted_the_keys_of_the_rest_are_moved_and_not_computed(family: str) -> None:
    """With one layer, a row's keys and values do not depend on other rows, so the rest equals a fresh session's KV."""

    config = copy.deepcopy(tiny.CONFIGS[family])
    config.num_hidden_layers = 1
    torch.manual_seed(7)
    shallow = AutoModelForCausalLM.from_config(config).eval()

    async def main() -> None:
        e = LocalEngine(Runner(copy.deepcopy(shallow), rotate_half=True), EngineSettings(kv_bytes=4 << 20))
        reference, seed = shallow, random.Random(5)
        session = await e.open()
        system = [seed.randrange(VOCABULARY) for _ in range(7)]
        rows: Shadow = [seed.randrange(VOCABULARY) for _ in range(90)]
        session.append(system)
        session.pin()
        session.append(rows)  # type: ignore[arg-type]
        for count in (20, 33):
            before = e.runner.stats.rows
            await session.settle(include_newest=True)
            session.evict(count)
            del rows[:count]
            first, *more = await tokens(session, 4)
            assert [first, *more] == greedy(reference, [*system, *rows], 4)
            rows += [first, *more]
            assert e.runner.stats.rows - before <= (97 + 4 if count == 20 else 6)
        twin = await e.open()
        twin.append([*system, *rows])  # type: ignore[list-item]
        assert await tokens(twin, 4) == greedy(reference, [*system, *rows], 4)
        assert twin.cached <= len(system)
        with pytest.raises(EngineError, match="cannot evict"):
            await e.thread.call(lambda: e.scheduler.evict(session.scheduled, 500))
        await integrity(e)
        e.close()

    asyncio.run(main())


def test_when_keys_cannot_be_moved_the_rows_behind_an_eviction_are_computed_anew() -> None:
    async def main() -> None:
        e = engine("gemma2")
        reference, seed = tiny.model("gemma2"), random.Random(5)
        session = await e.open()
        rows: Shadow = [seed.randrange(VOCABULARY) for _ in range(60)]
        session.append(rows[:5])  # type: ignore[arg-type]
        session.pin()
        session.append(rows[5:])  # type: ignore[arg-type]
        await session.settle(include_newest=True)
        session.evict(30)
        assert await tokens(session, 4) == greedy(reference, [*rows[:5], *rows[35:]], 4)
        await integrity(e)
        e.close()

    asyncio.run(main())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
def test_when_one_session_fails_the_others_go_on_and_it_can_be_rolled_back(layout: dict[str, Any]) -> None:
    class Refusing:
        @staticmethod
        def choose(choosers: Any, logits: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no")

        def accept(self, chosen: int) -> int:
            return chosen

    async def main() -> None:
        e = engine("llama", **layout)
        reference = tiny.model("llama")
        good, bad, worse = await e.open(), await e.open(), await e.open()
        rows: Shadow = [5, 6, 7]
        good.append([5, 6, 7])
        bad.append([1, 2])
        bad.append_embeddings(torch.full((2, tiny.WIDTH), float("nan")))
        worse.append([8, 9])
        results = await asyncio.gather(
            tokens(good, 8), tokens(bad, 8), tokens(worse, 8, chooser=Refusing()), return_exceptions=True
        )
        assert results[0] == greedy(reference, rows, 8)
        assert isinstance(results[1], ModelError)
        assert "not a number" in str(results[1])
        assert isinstance(results[2], ModelError)
        # A failed session can be rolled back to its valid rows, and continue.
        bad.rollback(2)
        assert await tokens(bad, 3) == greedy(reference, [1, 2], 3)
        worse.rollback(0)
        worse.append([8, 9])
        assert await tokens(worse, 3) == greedy(reference, [8, 9], 3)
        await integrity(e)
        e.close()

    asyncio.run(main())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout.values()))
def test_after_a_row_of_nan_the_rows_that_were_computed_with_it_are_computed_again(layout: dict[str, Any]) -> None:
    async def main() -> None:
        e, together = engine("llama", **layout), threading.Event()
        session = await e.open()
        # All rows are in one step, as they arrive while the thread is busy.
        e.thread.post(lambda: together.wait(10) and None)
        session.append([1, 2, 3])
        session.append_embeddings(torch.full((2, tiny.WIDTH), float("nan")))
        together.set()
        await session.settle()
        with pytest.raises(ModelError, match="not a number"):
            await tokens(session, 3)
        session.rollback(3)
        assert await tokens(session, 3) == greedy(tiny.model("llama"), [1, 2, 3], 3)
        await integrity(e)
        e.close()

    asyncio.run(main())


def test_a_single_row_waits_for_those_that_follow_unless_a_caller_waits_for_it() -> None:
    async def main() -> None:
        e = engine("llama")
        session = await e.open()
        session.append([1, 2])
        # The thread has had the time to compute the row: it runs this call after the rows have been appended.
        for _ in range(3):
            assert await e.thread.call(lambda: session.scheduled.rows.computed) == 0
        assert e.runner.stats.steps == 0
        session.append([3])
        await session.settle()
        assert (e.runner.stats.steps, e.runner.stats.rows) == (1, 2)
        assert await tokens(session, 3) == greedy(tiny.model("llama"), [1, 2, 3], 3)
        session.append([4])
        # The last token that was sampled is not computed yet.
        assert await e.thread.call(lambda: session.scheduled.rows.pending) == 2
        await session.settle()
        assert await e.thread.call(lambda: session.scheduled.rows.pending) == 1
        await integrity(e)
        e.close()

    asyncio.run(main())


def test_when_the_decoder_raises_only_the_session_at_fault_fails() -> None:
    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if 96 in inputs[0]:
            raise RuntimeError("out of memory")

    async def main() -> None:
        model = tiny.model("qwen2")
        model.get_input_embeddings().register_forward_pre_hook(refuse)
        e = LocalEngine(Runner(model), EngineSettings(kv_bytes=4 << 20))
        reference = tiny.model("qwen2")
        good, bad = await e.open(), await e.open()
        good.append([5, 6, 7])
        bad.append([1, 96])
        results = await asyncio.gather(tokens(good, 6), tokens(bad, 6), return_exceptions=True)
        assert results[0] == greedy(reference, [5, 6, 7], 6)
        assert isinstance(results[1], ModelError)
        await integrity(e)
        e.close()

    asyncio.run(main())


@pytest.mark.parametrize("disk", [False, True])
def test_when_a_parked_session_wakes_its_kv_is_the_same(disk: bool) -> None:
    async def main() -> None:
        room = {"host_bytes": 0, "disk_bytes": 1 << 24} if disk else {"host_bytes": 1 << 24, "disk_bytes": 0}
        e = engine("gemma2", **room)
        session = await e.open()
        session.append([i % VOCABULARY for i in range(150)])
        await session.settle()
        seat = session.scheduled
        before = await e.thread.call(lambda: seat.lease.extent.handle[:, :, :149].clone())  # type: ignore[union-attr]
        assert await e.thread.call(lambda: e.scheduler.cache.park(seat.lease, seat.rows.computed))
        state = await e.state()
        assert (state.parked, state.kv_bytes) == (1, 0)
        assert state.parked_bytes == 149 * e.scheduler.cache.storage.row_bytes
        assert await e.thread.call(lambda: e.scheduler.cache.wake(seat.lease, 150))
        after = await e.thread.call(lambda: seat.lease.extent.handle[:, :, :149])  # type: ignore[union-attr]
        assert torch.equal(before, after)
        assert (await e.state()).parked_bytes == 0
        e.close()

    asyncio.run(main())


def test_positions_on_three_axes_equal_a_full_forward() -> None:
    """An image between two texts, with Qwen2.5-VL's positions: (time, height, width) of each patch."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        **{k: v for k, v in tiny.SHAPE.items() if k != "max_position_embeddings"},
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": tiny.WIDTH}
    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    reference = Qwen2_5_VLForConditionalGeneration(config).eval()
    subject = Qwen2_5_VLForConditionalGeneration(copy.deepcopy(config)).eval()
    subject.load_state_dict(reference.state_dict())
    patches = torch.randn(6, tiny.WIDTH, generator=torch.Generator().manual_seed(2))
    places = [(4, 4 + h, 4 + w) for h in range(2) for w in range(3)]

    async def main() -> tuple[list[int], torch.Tensor]:
        e = LocalEngine(Runner(subject, position_axes=3), EngineSettings(kv_bytes=4 << 20))
        other, session = await e.open(), await e.open()
        other.append([9, 8, 7])
        noise = asyncio.create_task(tokens(other, 10))
        session.append([1, 2, 3, 4])
        session.append_embeddings(patches, [(0, h, w) for h in range(2) for w in range(3)])
        session.append([5, 6])
        out, hidden = [], []
        async for token in session.generate(Sampling(max_tokens=4, hidden=True)):
            out.append(token.id)
            hidden.append(token.hidden)
        await noise
        await integrity(e)
        e.close()
        return out, torch.stack(hidden)

    out, hidden = asyncio.run(main())
    with torch.inference_mode():
        table = reference.get_input_embeddings()
        rows = torch.cat((table(torch.tensor([1, 2, 3, 4])), patches, table(torch.tensor([5, 6, *out]))))
        flat = [(i,) * 3 for i in range(4)] + places + [(7 + i,) * 3 for i in range(2 + len(out))]
        positions = torch.tensor(flat).T[:, None]
        whole = torch.ones(1, len(rows), dtype=torch.long)
        full = reference(
            inputs_embeds=rows[None], attention_mask=whole, position_ids=positions, use_cache=False
        ).logits[0]
        got = reference.get_output_embeddings()(hidden)
    torch.testing.assert_close(got, full[11:-1], atol=1e-4, rtol=1e-4)


def test_sinks_receive_the_tapped_layers_output_before_the_next_token() -> None:
    """Tested next to another session, in chunks, again after a context cut, and for a span that is partly dropped."""
    model = tiny.model("qwen3")
    decoder = TextDecoder(model.model, model.lm_head, tap=2)
    patches = torch.randn(40, tiny.WIDTH, generator=torch.Generator().manual_seed(5))
    received: list[tuple[int, torch.Tensor]] = []
    seen = torch.zeros(40, tiny.WIDTH)

    def sink(before: int, made: torch.Tensor) -> None:
        received.append((before, made.clone()))
        seen[before : before + len(made)] = made

    async def main() -> None:
        e = LocalEngine(
            Runner(decoder), EngineSettings(kv_bytes=4 << 20, prefill_rows=16, prefill_only_rows=16, context_rows=64)
        )
        other, session = await e.open(), await e.open()
        other.append([9, 8, 7])
        noise = asyncio.create_task(tokens(other, 20))
        session.append([1, 2, 3])
        session.append_embeddings(patches, sink=sink)
        session.append([4])
        async with aclosing(session.generate(Sampling(max_tokens=1))) as made:
            await anext(made)
        assert sum(len(rows) for _, rows in received) == 40
        assert len(received) > 2
        expected = layer(patches, [1, 2, 3])
        torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-4)
        await noise
        # The oldest rows are dropped. The others are computed again and delivered with their own offsets.
        received.clear()
        session.append([5] * 30)
        await session.settle()
        assert received
        first = min(before for before, _ in received)
        assert first > 0
        assert sum(len(rows) for _, rows in received) == 40 - first
        torch.testing.assert_close(seen[first:], layer(patches[first:], []), atol=1e-4, rtol=1e-4)
        session.close()
        # Rows without a sink need no tap; rows with one fail on a decoder without a tapped layer.
        quiet = await e.open()
        quiet.append_embeddings(patches[:3])
        await quiet.settle(include_newest=True)
        e.close()
        plain = engine("qwen3")
        asking = await plain.open()
        asking.append_embeddings(patches[:3], sink=sink)
        with pytest.raises(ModelError, match="tapped"):
            await asking.settle(include_newest=True)
        plain.close()

    def layer(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """The second layer's output of the embedding rows after these tokens."""
        table = reference.get_input_embeddings()
        whole = torch.cat((table(torch.tensor(ids, dtype=torch.long)), rows))
        with torch.inference_mode():
            out = reference(inputs_embeds=whole[None], output_hidden_states=True, use_cache=False)
        return out.hidden_states[2][0, len(ids) :]

    reference = tiny.model("qwen3")
    asyncio.run(main())


def test_embeddings_of_another_width_are_refused() -> None:
    async def main() -> None:
        e = engine("qwen2")
        session = await e.open()
        with pytest.raises(ValueError, match="embeddings are"):
            session.append_embeddings(torch.zeros(3, tiny.WIDTH + 1))
        assert session.length == 0
        e.close()

    asyncio.run(main())
