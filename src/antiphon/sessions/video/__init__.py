"""Video sessions, which take frames, audio and questions, and return answers."""
