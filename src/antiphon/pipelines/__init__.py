"""Models made of models: a cascade of a language model and a voice, an observer of video, the wrappers around native models."""
