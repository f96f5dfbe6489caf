"""Plays clips in real time to RealtimeSTT's AudioToTextRecorder, and records its texts."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import argparse
import json
import resource
import threading
import time
from importlib.metadata import version

import numpy as np
import soundfile
from RealtimeSTT import AudioToTextRecorder

RATE = 16000
CHUNK = 512  # samples a step: 32 ms
GRACE = 0.6  # seconds of silence after the clip before the clip counts as finished
# Settings of the recorder that are stored with the result.
KEPT = (
    "post_speech_silence_duration", "deactivity_silence_confirmation_duration", "realtime_processing_pause",
    "init_realtime_after_seconds", "pre_recording_buffer_duration", "min_length_of_recording", "silero_sensitivity",
    "webrtc_sensitivity", "silero_deactivity_detection", "faster_whisper_vad_filter", "batch_size",
    "realtime_batch_size",
)  # fmt: skip


def read_pcm(path):
    """Return the samples of a 16 kHz mono file as int16."""
    pcm, rate = soundfile.read(path, dtype="int16")
    if rate != RATE or pcm.ndim != 1:
        raise ValueError(f"{path}: wanted 16 kHz mono, got {rate} Hz, shape {pcm.shape}")
    return pcm


def chunk_at(pcm, k):
    """Return step k of the stream as bytes: the clip, and after it zeros without end."""
    piece = pcm[k * CHUNK : (k + 1) * CHUNK]
    return np.pad(piece, (0, CHUNK - len(piece))).astype("<i2").tobytes()


class Clock:
    """Seconds since the first sample was sent; step k of the stream is due at k * 32 ms."""

    def __init__(self):
        self.t0 = time.monotonic()
        self.worst_late = 0.0

    def now(self):
        return time.monotonic() - self.t0

    def wait_for(self, k):
        """Return the seconds to sleep before sending step k (0 if it is already due)."""
        left = k * CHUNK / RATE - self.now()
        self.worst_late = max(self.worst_late, -left)
        return max(0.0, left)


def cpu_seconds():
    a = resource.getrusage(resource.RUSAGE_SELF)
    b = resource.getrusage(resource.RUSAGE_CHILDREN)
    return a.ru_utime + a.ru_stime + b.ru_utime + b.ru_stime


def one_line(text):
    return " ".join((text or "").split())


def event(t, kind, text, **more):
    return {"t": round(t, 3), "kind": kind, "text": one_line(text), **more}


class Session:
    """The recorder, the loop that takes its finals, and the events of the current clip."""

    def __init__(self, args):
        self.lock = threading.Lock()
        self.clock = None
        self.events = []
        self.marks = []
        self.stable = ""
        self.stops = 0  # recordings ended
        self.finals = 0  # final texts given
        self.error = None
        options = {
            "model": args.model,
            "realtime_model_type": args.model,
            "language": "en",
            "device": "cpu",
            "compute_type": "int8",
            "beam_size": args.beam,
            "beam_size_realtime": args.beam,
            "enable_realtime_transcription": True,
            "use_microphone": False,
            "silero_backend": "auto",
            "spinner": False,
            "no_log_file": True,
        }
        if args.silence is not None:
            options["post_speech_silence_duration"] = args.silence
        self.options = options
        self.recorder = AudioToTextRecorder(
            on_realtime_text_stabilization_update=self.on_stable,
            on_realtime_transcription_update=self.on_update,
            on_recording_start=lambda: self.mark("recording_start"),
            on_recording_stop=self.on_stop,
            **options,
        )
        self.running = True
        self.thread = threading.Thread(target=self.ask, daemon=True)
        self.thread.start()

    def settings(self):
        r = self.recorder
        s = {k: v for k, v in self.options.items() if k not in ("model", "realtime_model_type")}
        s["realtime_model"] = "same folder, loaded a second time"
        for name in KEPT:
            s[name] = getattr(r, name)
        s["silero_backend"] = r.silero_vad_model.backend
        return s

    def ask(self):
        while self.running:
            try:
                text = self.recorder.text()
            except Exception as e:
                self.error = e
                return
            with self.lock:
                if not self.running:
                    return
                self.finals += 1
                if self.clock is not None:
                    self.events.append(event(self.clock.now(), "final", text))

    def on_stable(self, ev):
        self.stable = ev.stable_text

    def on_update(self, text):
        with self.lock:
            if self.clock is not None:
                self.events.append(event(self.clock.now(), "partial", text, stable=one_line(self.stable)))

    def on_stop(self):
        with self.lock:
            self.stops += 1
        self.mark("recording_stop")

    def mark(self, what):
        with self.lock:
            if self.clock is not None:
                self.marks.append({"t": round(self.clock.now(), 3), "what": what})

    def quiet(self):
        """Return whether nothing is being recorded, and every recording has its final."""
        if self.error is not None:
            raise RuntimeError("the recorder's text() failed") from self.error
        with self.lock:
            return not self.recorder.is_recording and self.finals >= self.stops

    def play(self, clip, trail):
        while not (self.quiet() and self.recorder.start_recording_on_voice_activity):
            time.sleep(0.02)
        pcm = read_pcm(clip["path"])
        seconds = len(pcm) / RATE
        clock = Clock()
        with self.lock:
            self.clock, self.events, self.marks, self.stable = clock, [], [], ""
            stops = self.stops
        k = 0
        gave_up = False
        while True:
            time.sleep(clock.wait_for(k))
            self.recorder.feed_audio(chunk_at(pcm, k))
            k += 1
            over = k * CHUNK / RATE - seconds
            if over > GRACE and self.quiet() and (self.stops > stops or over > trail):
                break
            if over > trail + 6:
                gave_up = not self.quiet()
                break
        if gave_up and self.recorder.is_recording:
            self.recorder.stop()
        while not self.quiet():
            time.sleep(0.02)
        with self.lock:
            self.clock = None
            return {
                "id": clip["id"],
                "seconds": round(seconds, 3),
                "streamed_s": round(k * CHUNK / RATE, 3),
                "gave_up": gave_up,
                "worst_late_s": round(clock.worst_late, 3),
                "events": self.events,
                "marks": self.marks,
            }

    def close(self):
        with self.lock:
            self.running = False
        self.recorder.shutdown()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--clips", required=True, help="JSON list of {id, path, seconds}")
    p.add_argument("--model", required=True, help="folder with a CTranslate2 Whisper model")
    p.add_argument("--out", required=True, help="result file (JSON)")
    p.add_argument("--trail", type=float, default=4.0, help="seconds of silence after each clip (default 4)")
    p.add_argument(
        "--silence", type=float, default=None, help="post_speech_silence_duration in seconds (default: the peer's own)"
    )
    p.add_argument("--beam", type=int, default=1)
    args = p.parse_args()
    with open(args.clips, encoding="utf-8") as f:
        clips = json.load(f)
    session = Session(args)
    settings = {"trail": args.trail, "chunk_ms": 1000 * CHUNK / RATE}
    settings["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    wall0, cpu0 = time.monotonic(), cpu_seconds()
    found = [session.play(clip, args.trail) for clip in clips]
    data = {
        "peer": "RealtimeSTT",
        "version": version("realtimestt"),
        "settings": session.settings() | settings,
        "model": os.path.basename(os.path.normpath(args.model)),
        "wall_s": round(time.monotonic() - wall0, 3),
        "cpu_s": round(cpu_seconds() - cpu0, 3),
        "audio_s": round(sum(c["seconds"] for c in found), 3),
        "streamed_s": round(sum(c["streamed_s"] for c in found), 3),
        "max_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "clips": found,
    }
    with open(args.out, "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False, indent=1)
        f.write("\n")
    session.close()


if __name__ == "__main__":
    main()
