"""The OpenAI-compatible HTTP front: validation, text, and the life of a request."""
