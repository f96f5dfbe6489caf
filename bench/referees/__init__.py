"""Referees: callers of other projects that measure turn-taking by the audio, unmodified, over this server and peers."""
