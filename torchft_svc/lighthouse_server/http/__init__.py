"""The lighthouse's dashboard and HTTP API (``--http-bind``), served in its own event loop.

`server` needs the extra ``dashboard``, and is imported where the flag is given. It shows what the
driver knows; nothing in the rest of the lighthouse depends on it.
"""
