"""Tests of the decisions about quorums."""
