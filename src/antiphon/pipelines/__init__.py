"""Models that are composed of other models, such as a cascade of a language model and a voice, an observer of video,
and a wrapper for native models.
"""
