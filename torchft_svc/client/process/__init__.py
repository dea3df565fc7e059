"""The process of a trainer: its threads, deadlines, signals, forked children and its end."""
