"""The decisions: pure and synchronous; time is an argument, answers are frozen values."""
