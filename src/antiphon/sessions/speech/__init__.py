"""Speech synthesis: text in as it is written, units of sound out."""
