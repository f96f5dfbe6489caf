"""Full duplex (docs/wire/duplex.md): OpenAI's conversation plus epochs, acknowledged playback and turn states."""
