"""The streamed runtime."""
