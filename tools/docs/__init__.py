"""Draws and writes what the documents take from the code and from real runs."""
