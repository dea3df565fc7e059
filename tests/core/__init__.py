"""Tests of the decisions: tables, stories, properties and state machines; no clock, no I/O."""
