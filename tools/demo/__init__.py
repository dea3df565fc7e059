"""A demonstration that one can watch: groups train, are killed, come back, and nothing is lost."""
