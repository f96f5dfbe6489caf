"""Turn-taking: from speech probabilities, words and playback to turns, windows and who has the floor. Pure."""
