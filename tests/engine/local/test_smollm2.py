"""The engine on a real model in float32: after any operations, SmolLM2's logits equal those of a full forward."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest

from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from tests.engine.local.smollm2 import checkpoint
from tests.engine.local.test_engine import Driver, integrity


@pytest.mark.heavy
def test_sessions_side_by_side_equal_full_forwards() -> None:
    model, tokenizer = checkpoint()
    texts = (
        "The tide comes in twice a day because the Moon",
        "Once upon a time there was a lighthouse keeper who",
        "To bake bread you need flour, water, salt and",
    )

    async def main() -> None:
        e = LocalEngine(
            Runner(copy.deepcopy(model)), EngineSettings(kv_bytes=512 << 20, host_bytes=0, disk_bytes=1 << 30)
        )
        driver = Driver("llama", e)
        driver.reference = model
        for text in texts:
            session, rows = await e.open(), list(tokenizer.encode(text))
            session.append(rows)
            driver.live.append((session, rows))
        for number, name in enumerate(
            ("generate", "append", "generate", "fork", "rollback", "generate", "park", "cancel", "generate", "close")
        ):
            await getattr(driver, name)(random.Random(number))
            await integrity(e)
        await asyncio.gather(*(driver.generate_checked(s, rows, {"temperature": 0.0}) for s, rows in driver.live))
        e.close()

    asyncio.run(main())
