"""OpenAI's Realtime API, with its GA or beta names: docs/wire/openai-realtime.md, docs/wire/openai-transcription.md."""
