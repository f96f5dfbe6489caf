"""The video stream's messages."""
