"""What the peer drivers share: the command line, the paced stream, the result file."""

import argparse
import json
import os
import resource
import time

import numpy as np
import soundfile

RATE = 16000
CHUNK = 512  # samples a step: 32 ms


def parser(description):
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--clips", required=True, help="JSON list of {id, path, seconds}")
    p.add_argument("--model", required=True, help="folder with a CTranslate2 Whisper model")
    p.add_argument("--out", required=True, help="result file (JSON)")
    p.add_argument("--trail", type=float, default=4.0, help="seconds of silence after each clip (default 4)")
    return p


def load_clips(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def read_pcm(path):
    """The samples of a 16 kHz mono file as int16."""
    pcm, rate = soundfile.read(path, dtype="int16")
    if rate != RATE or pcm.ndim != 1:
        raise ValueError(f"{path}: wanted 16 kHz mono, got {rate} Hz, shape {pcm.shape}")
    return pcm


def chunk_at(pcm, k):
    """Step k of the stream, as bytes: the clip, then zeros without end."""
    piece = pcm[k * CHUNK : (k + 1) * CHUNK]
    if len(piece) < CHUNK:
        piece = np.concatenate([piece, np.zeros(CHUNK - len(piece), np.int16)])
    return piece.astype("<i2").tobytes()


class Clock:
    """Seconds since the first sample was sent; step k of the stream is due at k * 32 ms."""

    def __init__(self):
        self.t0 = None
        self.worst_late = 0.0

    def start(self):
        self.t0 = time.monotonic()

    def now(self):
        return time.monotonic() - self.t0

    def wait_for(self, k):
        """Seconds to sleep before sending step k (0 when it is already due)."""
        left = k * CHUNK / RATE - self.now()
        self.worst_late = max(self.worst_late, -left)
        return max(0.0, left)


def cpu_seconds():
    a = resource.getrusage(resource.RUSAGE_SELF)
    b = resource.getrusage(resource.RUSAGE_CHILDREN)
    return a.ru_utime + a.ru_stime + b.ru_utime + b.ru_stime


class Result:
    """Collects the clips and the totals of the streaming part, and writes the file."""

    def __init__(self, peer, version, settings, model):
        settings = dict(settings)
        settings["chunk_ms"] = 1000 * CHUNK / RATE
        settings["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
        self.head = {
            "peer": peer,
            "version": version,
            "settings": settings,
            "model": os.path.basename(os.path.normpath(model)),
        }
        self.clips = []
        self.wall0 = time.monotonic()
        self.cpu0 = cpu_seconds()

    def add(self, clip):
        self.clips.append(clip)

    def write(self, path):
        data = dict(self.head)
        data["wall_s"] = round(time.monotonic() - self.wall0, 3)
        data["cpu_s"] = round(cpu_seconds() - self.cpu0, 3)
        data["audio_s"] = round(sum(c["seconds"] for c in self.clips), 3)
        data["streamed_s"] = round(sum(c["streamed_s"] for c in self.clips), 3)
        data["max_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        data["clips"] = self.clips
        with open(path, "w", encoding="utf-8") as f:
            json.dump(data, f, ensure_ascii=False, indent=1)
            f.write("\n")


def one_line(text):
    return " ".join((text or "").split())


def event(t, kind, text, **more):
    return {"t": round(t, 3), "kind": kind, "text": one_line(text), **more}
