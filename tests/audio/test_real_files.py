"""Files from recorders, phones, call centres and pipes: all of their speech is decoded."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import SkippedAudio, decode, decode_all
from tests.audio.sound_files import heard, of_kind, pcm16, wav, written
from tests.conftest import DATA

SAID = decode_all(str(DATA / "audio" / "jfk.flac"))[: 2 * SAMPLE_RATE_HZ]
RAW = pcm16(SAID)
PCM24 = (SAID * 8_388_607).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
PCM_GUID = b"\x01\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
TAG = b"ID3\x03\0\0\0\0\0\x0a" + bytes(10)


def ulaw(pcm: Pcm) -> np.ndarray:
    data = written(pcm, "wav", "pcm_mulaw", 8000)
    return np.frombuffer(data[data.index(b"data") + 8 :], np.uint8)


def call(*sides: np.ndarray) -> bytes:
    return wav(np.stack(sides, 1).tobytes(), code=7, channels=2, rate_hz=8000, bits=8, fmt=b"\0\0")


SIDE = ulaw(SAID)
SILENT = np.full(len(SIDE), 0xFF, np.uint8)
LIST = b"LIST\x1a\0\0\0INFOISFT\x0e\0\0\0Lavf61.1.100\0\0"
FILES = {
    "piped": wav(RAW, sizes=0xFFFFFFFF, behind=LIST),
    "never finished": wav(RAW, sizes=0),
    "broadcast": wav(RAW, before=b"bext" + struct.pack("<I", 602) + bytes(602)),
    "24 bits, extensible": wav(PCM24, code=0xFFFE, bits=24, fmt=struct.pack("<HHI", 22, 24, 4) + PCM_GUID),
    "float of another scale": wav((SAID * 2).astype("<f4").tobytes(), code=3, bits=32),
    "a channel of NaN": wav(
        np.stack([SAID, np.full_like(SAID, np.nan)], 1).astype("<f4").tobytes(), code=3, channels=2, bits=32
    ),
    "call, one side": call(SIDE, SILENT),
    "call, the other side": call(SILENT, SIDE),
    "Microsoft ADPCM": written(SAID, "wav", "adpcm_ms", 8000),
    "IMA ADPCM": written(SAID, "wav", "adpcm_ima_wav", 8000),
    "MP3 in a WAV": written(SAID, "wav", "libmp3lame", 16_000),
    "MP3 in RIFF, RMP3": b"RIFF" + struct.pack("<I", 20_000) + b"RMP3data" + struct.pack("<I", 19_000)
    + of_kind(SAID, "mp3"),
    "tag before a WAV": TAG + wav(RAW),
    "two tags before an MP3": TAG + TAG + of_kind(SAID, "mp3"),
    "HTTP's head before a WAV": b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\n\r\n" + wav(RAW),
    "bytes before an M4A": b"\r\n" + of_kind(SAID, "m4a"),
    "FLAC without its head": of_kind(SAID, "flac")[8000:],
    "AMR of a phone": written(SAID, "amr", "libopencore_amrnb", 8000),
    "3GP of a phone": written(SAID, "3gp", "aac", 44_100),
    "transport stream": written(SAID, "mpegts", "aac", 44_100),
    "big-endian floats": wav(SAID.astype(">f4").tobytes(), code=3, bits=32, order=">"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_all_that_is_said_is_heard(name: str) -> None:
    skipped = SkippedAudio()
    windows = heard(SAID, np.concatenate(list(decode(io.BytesIO(FILES[name]), skipped=skipped))))
    # Some files have only telephone bandwidth. A FLAC file without a header begins with its second frame.
    assert sum(windows) >= len(windows) - 1
    assert skipped.seconds < 0.1


def test_gsm_in_a_wav_is_decoded() -> None:
    # FFmpeg has no encoder for it here. A block of 65 bytes has two frames of 20 ms.
    data = wav(bytes(range(65)) * 25, code=0x31, rate_hz=8000, bits=0, block=65, fmt=struct.pack("<HH", 2, 320))
    assert len(decode_all(io.BytesIO(data))) == pytest.approx(SAMPLE_RATE_HZ, abs=50)


def test_of_a_video_with_several_tracks_the_first_sound_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as file:
        picture = file.add_stream("mpeg4", rate=25)
        picture.width = picture.height = 32
        tracks = [file.add_stream("pcm_s16le", rate=SAMPLE_RATE_HZ, layout="mono") for _ in range(2)]
        file.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
        for track, pcm in zip(tracks, (SAID, SAID[::-1]), strict=True):
            frame = av.AudioFrame.from_ndarray((pcm * 32767).astype(np.int16)[None], "s16", "mono")
            frame.sample_rate = SAMPLE_RATE_HZ
            file.mux(track.encode(frame))
    assert all(heard(SAID, decode_all(str(path))))
