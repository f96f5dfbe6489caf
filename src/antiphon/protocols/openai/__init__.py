"""OpenAI's Realtime API in GA and beta names: docs/wire/openai-transcription.md and docs/wire/openai-realtime.md."""
