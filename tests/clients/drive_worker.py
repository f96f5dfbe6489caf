"""The MiniCPM-o demo's front end behind its gateway, which no registry has: its frames, sent and played as it does.

In the order of its source (MiniCPM-o-Demo, `static/duplex/lib/duplex-session.js` and the worker's `/ws/duplex`): it
asks for the worker's health, sends `prepare` and waits for `prepared`, sends a second of float32 each second and waits
for its `result`, pauses and goes on, and stops. A result is played when the one before has ended.
"""

import asyncio
import base64
import json
import sys
import urllib.request

import numpy as np
import soundfile
import websockets

OUT_HZ, LIMIT_S = 24_000, 90


async def hold(url: str, sound: np.ndarray) -> None:
    results = []
    async with websockets.connect(url.replace("http", "ws", 1) + "/ws/duplex", max_size=None) as socket:
        await socket.send(json.dumps({"type": "prepare", "system_prompt": "You are helpful. Answer in two sentences."}))
        assert json.loads(await socket.recv())["type"] == "prepared"

        async def second(number: int, **more: bool) -> dict:
            pcm = sound[number * 16_000 : (number + 1) * 16_000]
            pcm = np.concatenate((pcm, np.zeros(16_000 - len(pcm), np.float32)))
            data = base64.b64encode(pcm.astype("<f4").tobytes()).decode()
            await socket.send(json.dumps({"type": "audio_chunk", "audio_base64": data} | more))
            result = json.loads(await socket.recv())
            assert result["type"] == "result", result
            assert result["current_time"] == len(results), result
            results.append(result)
            await asyncio.sleep(1.0)
            return result

        async with asyncio.timeout(LIMIT_S):
            # A model of random weights may never stop speaking. After ten seconds the client makes it listen.
            spoken = []
            while len(spoken) < 10 and not any(r["end_of_turn"] for r in results):
                await second(len(results))
                spoken = [r for r in results if not r["is_listen"]]
            await socket.send(json.dumps({"type": "pause"}))
            assert json.loads(await socket.recv())["type"] == "paused"
            await socket.send(json.dumps({"type": "resume"}))
            assert json.loads(await socket.recv())["type"] == "resumed"
            for _ in range(2):
                listening = await second(len(results), force_listen=True)
            assert listening["is_listen"], "the client made it listen, and it spoke"
            await socket.send(json.dumps({"type": "stop"}))
            assert json.loads(await socket.recv())["type"] == "stopped"
    audio = [np.frombuffer(base64.b64decode(r["audio_data"]), "<f4") for r in results]
    lengths = {len(a) for a, r in zip(audio, results, strict=True) if not r["end_of_turn"]}
    assert lengths == {OUT_HZ}, f"results of {lengths} samples"
    assert "".join(r["text"] for r in spoken).strip(), "no words"
    heard = sum(np.count_nonzero(a) for a in audio) / OUT_HZ
    assert heard > 0.3, "no sound"
    print(f"the MiniCPM-o demo's frames: {len(results)} seconds, {heard:.1f} s of sound, each result a second")


def main() -> None:
    sound, rate = soundfile.read(sys.argv[2], dtype="float32")
    assert rate == 16_000
    health = json.load(urllib.request.urlopen(f"{sys.argv[1]}/health", timeout=10))
    assert health["worker_status"] in ("idle", "duplex_active"), health
    asyncio.run(hold(sys.argv[1], sound))


main()
