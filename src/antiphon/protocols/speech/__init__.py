"""Speech synthesis: the speech stream (docs/wire/speech-stream.md), and speech over HTTP (docs/wire/speech.md)."""
