"""The dashboard: one page with its script and its style, written by hand and served as they are."""
