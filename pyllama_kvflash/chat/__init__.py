"""Conversations as prompts, and answers as messages."""
