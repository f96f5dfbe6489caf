"""Forced alignment of known words by PocketSphinx (HMM, 10 ms frames):

the times of words, by another kind of model.
"""

import argparse
import json
import re
import wave
from pathlib import Path

from pocketsphinx import Decoder


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--clips", required=True, help="JSON: a list of {path (16 kHz mono WAV), text}")
    p.add_argument("--out", required=True)
    args = p.parse_args()
    decoder = Decoder(loglevel="FATAL", samprate=16000)
    out = []
    for clip in json.loads(Path(args.clips).read_text()):
        words = [re.sub(r"[^a-z']", "", w) for w in clip["text"].lower().split()]
        found = None
        # A sentence with a word that is not in the dictionary cannot be aligned, and is skipped.
        if all(words) and all(decoder.lookup_word(w) for w in words):
            with wave.open(clip["path"]) as f:
                data = f.readframes(f.getnframes())
            try:
                decoder.set_align_text(" ".join(words))
                decoder.start_utt()
                decoder.process_raw(data, full_utt=True)
                decoder.end_utt()
                spans = [
                    (s.start_frame / 100, (s.end_frame + 1) / 100)
                    for s in decoder.seg() or ()
                    if not s.word.startswith(("<", "["))
                ]
                found = spans if len(spans) == len(words) else None
            except RuntimeError:
                found = None
        out.append(found)
    Path(args.out).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
