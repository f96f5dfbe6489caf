"""Plays clips in real time into RealtimeSTT's AudioToTextRecorder and records what it shows."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
import threading
import time
from importlib.metadata import version

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import common
from RealtimeSTT import AudioToTextRecorder

GRACE = 0.6  # seconds of silence after the clip before "nothing going on" is believed


class Session:
    """The recorder, the loop that asks it for finals, and the events of the clip in play."""

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
        for name in (
            "post_speech_silence_duration",
            "deactivity_silence_confirmation_duration",
            "realtime_processing_pause",
            "init_realtime_after_seconds",
            "pre_recording_buffer_duration",
            "min_length_of_recording",
            "silero_sensitivity",
            "webrtc_sensitivity",
            "silero_deactivity_detection",
            "faster_whisper_vad_filter",
            "batch_size",
            "realtime_batch_size",
        ):
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
                    self.events.append(common.event(self.clock.now(), "final", text))

    def on_stable(self, ev):
        self.stable = ev.stable_text

    def on_update(self, text):
        with self.lock:
            if self.clock is not None:
                self.events.append(common.event(self.clock.now(), "partial", text, stable=common.one_line(self.stable)))

    def on_stop(self):
        with self.lock:
            self.stops += 1
        self.mark("recording_stop")

    def mark(self, what):
        with self.lock:
            if self.clock is not None:
                self.marks.append({"t": round(self.clock.now(), 3), "what": what})

    def quiet(self):
        """Nothing being recorded, and a final given for every recording so far."""
        if self.error is not None:
            raise RuntimeError("the recorder's text() failed") from self.error
        with self.lock:
            return not self.recorder.is_recording and self.finals >= self.stops

    def play(self, clip, trail):
        while not (self.quiet() and self.recorder.start_recording_on_voice_activity):
            time.sleep(0.02)
        pcm = common.read_pcm(clip["path"])
        seconds = len(pcm) / common.RATE
        clock = common.Clock()
        with self.lock:
            self.clock, self.events, self.marks, self.stable = clock, [], [], ""
            stops = self.stops
        clock.start()
        k = 0
        gave_up = False
        while True:
            time.sleep(clock.wait_for(k))
            self.recorder.feed_audio(common.chunk_at(pcm, k))
            k += 1
            over = k * common.CHUNK / common.RATE - seconds
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
                "streamed_s": round(k * common.CHUNK / common.RATE, 3),
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
    p = common.parser(__doc__)
    p.add_argument(
        "--silence", type=float, default=None, help="post_speech_silence_duration in seconds (default: the peer's own)"
    )
    p.add_argument("--beam", type=int, default=1)
    args = p.parse_args()
    clips = common.load_clips(args.clips)
    session = Session(args)
    result = common.Result(
        "RealtimeSTT", version("realtimestt"), dict(session.settings(), trail=args.trail), args.model
    )
    for clip in clips:
        result.add(session.play(clip, args.trail))
    result.write(args.out)
    session.close()


if __name__ == "__main__":
    main()
