"""Chat: from messages to a prompt, and from an answer to a message."""
