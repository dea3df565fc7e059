"""Tests of the worker's decisions."""
