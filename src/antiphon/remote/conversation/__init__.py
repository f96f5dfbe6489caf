"""Conversation models on other servers, which answer over OpenAI's Realtime API.

`items.py` writes messages as items, `events.py` reads the server's events, `session.py` holds one session at a server
and keeps its items equal to the conversation, and `model.py` combines them into a ConversationModel.
"""
