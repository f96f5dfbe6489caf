"""Pictures as arrays: decoding encoded images, filtering frames, describing a scene without a model. Pure."""
