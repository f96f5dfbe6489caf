"""The dialect of a video stream (docs/wire/video-stream.md)."""
