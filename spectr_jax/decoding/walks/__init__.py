"""Walks that decide on whole paths; the one that goes token by token is `decoding.selection`."""
