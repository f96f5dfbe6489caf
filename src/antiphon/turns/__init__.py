"""Turn-taking: turns speech probabilities, words and playback into turns, windows and the floor. Pure."""
