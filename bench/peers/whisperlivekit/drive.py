"""Plays clips in real time into WhisperLiveKit's AudioProcessor (LocalAgreement over
faster-whisper) and records what it shows."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import asyncio
import logging
import sys
from importlib.metadata import version

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import common
from whisperlivekit import AudioProcessor, TranscriptionEngine
from whisperlivekit.local_agreement import whisper_online

# Its warm-up downloads a clip and imports librosa; load() warms up instead.
whisper_online.warmup_asr = lambda *args, **kwargs: None


def load(args):
    # The same fields the server fills from its command line, all others default.
    engine = TranscriptionEngine(
        backend_policy="localagreement",
        backend="faster-whisper",
        model_dir=args.model,
        lan="en",
        pcm_input=True,
    )
    asr = engine.asr
    if args.beam:
        whole = asr.model.transcribe

        def transcribe(*a, **kw):
            kw["beam_size"] = args.beam
            return whole(*a, **kw)

        asr.model.transcribe = transcribe
    asr.transcribe(np.random.default_rng(0).normal(0, 0.01, 5 * common.RATE).astype(np.float32))
    return engine


def shown(front):
    """(committed, committed and unconfirmed) as the page of the peer shows them."""
    committed = common.one_line(" ".join(line.text for line in front.lines if line.text))
    tail = front.buffer_transcription or ""
    gap = " " if tail[:1].isspace() or tail[:1].isalnum() else ""
    return committed, common.one_line(committed + gap + tail)


async def play(engine, clip, trail, eos):
    pcm = common.read_pcm(clip["path"])
    seconds = len(pcm) / common.RATE
    clock = common.Clock()
    states = []  # (t, committed, shown)

    processor = AudioProcessor(transcription_engine=engine)
    fronts = await processor.create_tasks()

    async def collect():
        async for front in fronts:
            if front.error:
                raise RuntimeError(front.error)
            state = shown(front)
            if state != (states[-1][1:] if states else ("", "")):
                states.append((clock.now(), *state))

    clock.start()
    collector = asyncio.create_task(collect())
    length = seconds + (trail if eos == "trail" else 0)
    k = 0
    while k * common.CHUNK / common.RATE < length:
        await asyncio.sleep(clock.wait_for(k))
        await processor.process_audio(common.chunk_at(pcm, k))
        k += 1
    await asyncio.sleep(clock.wait_for(k))
    eos_t = clock.now()
    await processor.process_audio(b"")
    done, _ = await asyncio.wait({collector}, timeout=trail + 6 - (eos_t - seconds))
    if done:
        collector.result()
    else:
        collector.cancel()
    await processor.cleanup()

    events = [common.event(t, "partial", text, stable=committed) for t, committed, text in states]
    final = None
    if states:
        # The final: the first state from which on the committed text stays as it is,
        # and (shown_t) the first from which on the shown text stays as it is.
        i = j = len(states) - 1
        while i > 0 and states[i - 1][1] == states[-1][1]:
            i -= 1
        while j > 0 and states[j - 1][2] == states[-1][2]:
            j -= 1
        final = common.event(
            states[i][0], "final", states[-1][1], shown_t=round(states[j][0], 3), after_eos=states[i][0] > eos_t
        )
        events.insert(i + 1, final)
    return {
        "id": clip["id"],
        "seconds": round(seconds, 3),
        "streamed_s": round(k * common.CHUNK / common.RATE, 3),
        "eos_t": round(eos_t, 3),
        "gave_up": not done,
        "worst_late_s": round(clock.worst_late, 3),
        "events": events,
    }


async def run(args, engine):
    asr = engine.asr
    names = (
        "backend_policy",
        "backend",
        "lan",
        "pcm_input",
        "vac",
        "vac_chunk_size",
        "min_chunk_size",
        "asr_coalesce_min_s",
        "buffer_trimming",
        "buffer_trimming_sec",
        "confidence_validation",
        "pause_segmentation_seconds",
    )
    settings = {n: getattr(engine.args, n) for n in names}
    settings.update(
        compute_type=asr.model.model.compute_type,
        beam_size=args.beam or 5,
        vac_model="onnx" if engine.vac_session else "jit",
        eos=args.eos,
        trail=args.trail,
    )
    result = common.Result("WhisperLiveKit", version("whisperlivekit"), settings, args.model)
    for clip in common.load_clips(args.clips):
        result.add(await play(engine, clip, args.trail, args.eos))
    result.write(args.out)


def main():
    p = common.parser(__doc__)
    p.add_argument(
        "--beam", type=int, default=0, help="beam size forced on the model (default 0: the peer's own fixed 5)"
    )
    p.add_argument(
        "--eos",
        choices=("trail", "clip"),
        default="trail",
        help="send the end of the stream after the trailing silence (default) or right after the clip's last sample",
    )
    p.add_argument("--verbose", action="store_true", help="keep the peer's log")
    args = p.parse_args()
    if not args.verbose:
        logging.disable(logging.INFO)
    engine = load(args)
    asyncio.run(run(args, engine))


if __name__ == "__main__":
    main()
