"""Speech synthesis: text in as it is written, the audio of its sentences out."""
