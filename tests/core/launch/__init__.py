"""Tests of the decisions about launched runs."""
