"""vLLM-Omni's DuplexClient: a turn is answered and acknowledged as it plays, interrupted, resumed after a cut, closed.

The client is a module of a large wheel whose other modules need a GPU's libraries. So the wheel is unpacked, and the
client imported alone.
"""

import asyncio
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import soundfile

HERE = Path(__file__).resolve().parent
WHEEL, FOLDER = "vllm-omni==0.30.0", HERE / ".venv-duplex" / "vllm-omni"


def unpacked() -> Path:
    """The wheel's files, none of them installed."""
    if not FOLDER.is_dir():
        part = FOLDER.with_suffix(".part")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, WHEEL], check=True)
        with zipfile.ZipFile(next(part.glob("*.whl"))) as wheel:
            wheel.extractall(part)
        part.rename(FOLDER)
    return FOLDER


package = types.ModuleType("vllm_omni")
package.__path__ = [str(unpacked() / "vllm_omni")]
sys.modules["vllm_omni"] = package
from vllm_omni.clients.duplex import ConnectionResumed, DuplexClient, SessionConfig  # noqa: E402


async def hold(url: str, pcm: bytes) -> None:
    config = SessionConfig(instructions="You are helpful. Answer in two sentences.")
    async with DuplexClient(url.replace("http", "ws", 1), model="gpt-realtime", config=config) as client:
        capabilities = client.session_info["capabilities"]
        assert capabilities["supports_session_resume"], capabilities
        assert capabilities["supports_barge_in"], capabilities
        events = []

        async def watch() -> None:
            async for event in client.events():
                events.append(event)

        watching = asyncio.create_task(watch())
        responses = client.responses()

        async def spoken():
            """The next response that is spoken."""
            while True:
                response = await anext(responses)
                if response.decision != "listen":
                    return response

        # A turn, answered and heard to its end.
        await client.stream_pcm(pcm)
        await client.commit()
        first = await asyncio.wait_for(spoken(), 60)
        audio = b""
        async for chunk in first.audio():
            audio += chunk
            await client.ack_playback(first.played_ms)
        assert len(audio) > 24_000, "the answer has no sound"
        assert first.transcript.strip(), "the answer has no words"
        assert client.resume_token

        # The next is cut by the client speaking over it.
        await client.stream_pcm(pcm)
        await client.commit()
        second = await asyncio.wait_for(spoken(), 60)
        async for _ in second.audio():
            break
        await client.ack_playback(400, response_id=second.response_id, item_id=f"item_{second.response_id}")
        await client.send({"type": "barge_in"})
        await second.wait(20)
        epochs = [e.raw["epoch"] for e in events if e.type == "turn.event"]
        assert epochs[-1] > epochs[0], "no epoch was raised"

        # The socket breaks; the client resumes by itself, and holds another turn.
        await client._ws.close()
        for _ in range(200):
            if any(isinstance(e, ConnectionResumed) for e in events):
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the session was not resumed")
        await client.stream_pcm(pcm)
        await client.commit()
        third = await asyncio.wait_for(spoken(), 60)
        sounded = 0
        async for chunk in third.audio():
            sounded += len(chunk)
        assert sounded > 24_000, "no answer after the resume"
        numbers = [e.server_event_seq for e in events if e.server_event_seq is not None]
        assert numbers == sorted(set(numbers)), "an event came twice"
        errors = [e.raw for e in events if e.type == "error"]
        assert not errors, errors
        await client.close()
        watching.cancel()
    print(f"vllm-omni DuplexClient: {len(audio) / 48000:.1f} s of sound, interrupted, resumed, {len(numbers)} events")


def main() -> None:
    url, path = sys.argv[1:3]
    sound, rate = soundfile.read(path, dtype="float32")
    assert rate == 16_000
    sound = np.concatenate((sound, np.zeros(rate // 2, np.float32)))
    asyncio.run(hold(url, (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()))


main()
