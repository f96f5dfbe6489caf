"""Models composed of models: the cascade of language model and voice, the observer of video, a native
model's wrapper.
"""
