"""Conversations: the user's turns, the items, the responses and the part of them that was heard."""
