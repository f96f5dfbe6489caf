"""Speech synthesis: text arrives while it is written, and the audio of its sentences is returned."""
