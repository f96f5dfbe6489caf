"""Speech synthesis: text arrives while it is being written, and the audio of its sentences is returned."""
