"""Images as arrays: decoding encoded images, filtering the frames of a stream, describing a scene without a model.

Everything here is pure: bytes or pixels in, pixels, numbers and words out.
"""
