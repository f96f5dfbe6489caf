"""Models composed of models: a cascade of language model and voice, an observer of video, a native model's wrapper."""
