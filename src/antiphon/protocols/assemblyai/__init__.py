"""AssemblyAI's dialect: streaming transcription, version 3. See docs/wire/assemblyai.md."""
