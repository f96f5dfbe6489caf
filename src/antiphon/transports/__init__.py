"""Transports that carry frames (WebSocket and WebRTC), and their attachment to a live session, one at a time."""
