"""Answers of chats: what their grammars are, and what their texts consist of."""
