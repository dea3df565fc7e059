"""Scenes for the tests of the core, and slow obvious twins of its functions."""
