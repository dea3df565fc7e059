"""The checkpoint transport over HTTP."""
