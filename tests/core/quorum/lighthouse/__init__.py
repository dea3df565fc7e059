"""Tests of the lighthouse's decisions."""
