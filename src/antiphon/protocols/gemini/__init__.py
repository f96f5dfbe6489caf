"""Google's Gemini Live API, `BidiGenerateContent`. See docs/wire/gemini-live.md."""
