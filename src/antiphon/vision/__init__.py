"""Images as arrays: decodes images, filters the frames of a stream, and describes scenes without a model.

All functions are pure: they take bytes or pixels, and return pixels, numbers and words.
"""
