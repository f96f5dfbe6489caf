"""The audio of telephone lines: codecs, jitter, tones, answering machines."""
