"""Full duplex (docs/wire/duplex.md): OpenAI's conversation with epochs, acknowledged playback and turn states."""
