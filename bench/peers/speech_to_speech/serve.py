"""Serves Hugging Face speech-to-speech over the OpenAI Realtime API, with the models in antiphon's model folder.

    bench/peers/setup.sh speech_to_speech
    bench/peers/.venv-speech_to_speech/bin/python bench/peers/speech_to_speech/serve.py [--port 8765]
    antiphon certify --url ws://127.0.0.1:8765 --kinds captions,conversation --minutes 0 --out peer.json

The package is unmodified. Two servers run next to it: llama.cpp's own for the language model, and one for the voice.
The latter is thirty lines of code around hibari-tts, because the package would fetch its own voices from a hub. At its
first start, the package fetches Silero's repository (torch.hub) and NLTK's `punkt_tab`. Without a network, set
TORCH_HOME and NLTK_DATA to folders that have them. --pipelines is the number of concurrent sessions, 1 by default.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HOME = Path.home() / ".cache" / "antiphon" / "models"


def language_model(port: int, model: Path, threads: int) -> None:
    """Run llama.cpp's own server until SIGTERM."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {"local"}
    params.hostnames = ["127.0.0.1"]
    params.port, params.n_ctx, params.n_predict = port, 4096, 128
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.sampling.temp = 0.0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    os._exit(0)


def voice(port: int, model: Path) -> None:
    """Serve `/v1/audio/speech` with hibari-tts: 24 kHz PCM16, one sentence at a time."""
    import numpy as np
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import StreamingResponse
    from hibari import Hibari

    synthesizer, app = Hibari(model=str(model), threads=1), FastAPI()
    synthesizer("Warm up.")

    async def speech(request: Request) -> StreamingResponse:
        asked = await request.json()
        sound = synthesizer.stream(asked["input"], speed=float(asked.get("speed") or 1.0), seed=0)
        pieces = ((np.clip(pcm, -1, 1) * 32767).astype("<i2").tobytes() for pcm in sound)
        return StreamingResponse(pieces, media_type="audio/pcm")

    # FastAPI looks the annotations up by name in the module's namespace.
    speech.__annotations__ = {"request": Request}
    app.post("/v1/audio/speech")(speech)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens. Raises SystemExit if its process ends before that."""
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} has ended")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve speech-to-speech with antiphon's models.")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--models", type=Path, default=HOME)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--part", choices=("llm", "tts"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    models: Path = args.models
    if args.part == "llm":
        return language_model(args.port, models / "smollm2-135m-instruct" / "model.gguf", args.threads)
    if args.part == "tts":
        return voice(args.port, models / "hibari-heart" / "hibari.onnx")
    me = [sys.executable, __file__, "--models", str(models), "--threads", str(args.threads)]
    llm, tts = args.port + 1, args.port + 2
    parts = [
        subprocess.Popen([*me, "--part", part, "--port", str(port)]) for part, port in (("llm", llm), ("tts", tts))
    ]
    command = [
        *(str(Path(sys.executable).parent / "speech-to-speech"), "serve", "--host", "127.0.0.1"),
        *("--port", str(args.port), "--num_pipelines", str(args.pipelines), "--device", "cpu"),
        *("--stt", "faster-whisper", "--faster_whisper_stt_model_name", str(models / "whisper-base")),
        *("--faster_whisper_stt_device", "cpu", "--faster_whisper_stt_compute_type", "int8"),
        *("--faster_whisper_stt_gen_language", "en", "--llm_backend", "chat-completions", "--model_name", "local"),
        *("--responses_api_base_url", f"http://127.0.0.1:{llm}/v1", "--responses_api_api_key", "none"),
        *("--stream_batch_sentences", "1", "--tts", "openai", "--openai_tts_model", "hibari"),
        *("--openai_tts_base_url", f"http://127.0.0.1:{tts}/v1", "--openai_tts_voice", "heart"),
        *("--smart_turn_model_path", str(models / "smart-turn-v3.2" / "smart-turn.onnx")),
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for part, port in zip(parts, (llm, tts), strict=True):
            wait_for(port, part)
        parts.append(subprocess.Popen(command))
        wait_for(args.port, parts[-1])
        print(f"ws://127.0.0.1:{args.port}/v1/realtime", flush=True)
        parts[-1].wait()
    finally:
        for process in parts:
            process.terminate()


if __name__ == "__main__":
    main()
