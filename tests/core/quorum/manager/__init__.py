"""Tests of the manager's decisions."""
