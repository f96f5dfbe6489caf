"""Turn-taking: derives turns, windows and the floor from speech probabilities, words and playback. Pure."""
