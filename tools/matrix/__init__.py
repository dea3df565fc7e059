"""Draws training programs as users write them, runs them with kills, and compares their bits."""
