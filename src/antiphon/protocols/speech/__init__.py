"""Speech synthesis over a WebSocket (docs/wire/speech-stream.md) and over HTTP (docs/wire/speech.md)."""
