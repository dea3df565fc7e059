"""Launches the workers of a run, and tells them about new worlds instead of restarting them."""
