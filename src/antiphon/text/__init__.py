"""Prepares text for a voice: removes markup, splits text into sentences, and estimates the times of words. Pure."""
