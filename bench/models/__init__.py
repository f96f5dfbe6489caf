"""Models with random weights, made in place on their device: in released dimensions, or tiny ones for a dry run.

Timing needs no training, so nothing is downloaded. A module holds one family: its dimensions by size ("tiny", "0.6B"),
and a function that returns the model as antiphon loads it.
"""
