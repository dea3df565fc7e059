"""How the members of a process group meet, and hear of failed members, over a store."""
