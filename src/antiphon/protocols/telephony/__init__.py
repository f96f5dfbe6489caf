"""Media streams of telephone carriers over a WebSocket, without I/O: docs/wire/telephone.md."""
