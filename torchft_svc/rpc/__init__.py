"""Channels, codecs, deadlines, error mapping: the one place that knows gRPC's ways."""
