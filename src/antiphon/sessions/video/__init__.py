"""Video sessions: they take frames, audio and questions, and return answers."""
