"""The openbmb-realtime SDK: a spoken turn answered in sound and words, interrupted, closed."""

import asyncio
import sys

import numpy as np
import soundfile
from openbmb_realtime import RealtimeClient


async def hold(url: str, sound: np.ndarray) -> None:
    client = RealtimeClient(api_key="none", base_url=f"{url}/v1")
    session = await client.audio.connect(
        model="MiniCPM-o-4_5", system_prompt="You are helpful. Answer in two sentences."
    )
    seen: list = []

    async def watch() -> None:
        async for event in session:
            seen.append(event)

    watching = asyncio.create_task(watch())

    async def speak() -> None:
        for at in range(0, len(sound), 1600):
            await session.send_audio(sound[at : at + 1600].astype("<f4").tobytes())
            await asyncio.sleep(0.1)

    def count(name: str) -> int:
        return sum(type(e).__name__ == name for e in seen)

    async def until(name: str, more: int) -> None:
        async with asyncio.timeout(30):
            while count(name) < more:
                await session.send_audio(np.zeros(1600, "<f4").tobytes())
                await asyncio.sleep(0.1)

    assert session.id
    await speak()
    await until("AudioDelta", 3)
    await until("TurnCompleted", 1)
    text = "".join(e.text for e in seen if type(e).__name__ == "TextDelta")
    audio = sum(len(e.audio) for e in seen if type(e).__name__ == "AudioDelta") / 4 / 24_000
    assert text.strip(), "no words"
    assert audio > 0.5, "no sound"
    # Spoken over: what follows the interruption is a turn that is over.
    turns, sounds = count("TurnCompleted"), count("AudioDelta")
    await speak()
    await until("AudioDelta", sounds + 1)
    session.interrupt()
    await until("TurnCompleted", turns + 1)
    assert not [e for e in seen if type(e).__name__ == "ErrorEvent"], seen
    await session.close()
    watching.cancel()
    print(f"openbmb-realtime: {audio:.1f} s of sound, {len(text.split())} words, interrupted")


def main() -> None:
    sound, rate = soundfile.read(sys.argv[2], dtype="float32")
    assert rate == 16_000
    asyncio.run(hold(sys.argv[1], np.concatenate((sound, np.zeros(rate, np.float32)))))


main()
