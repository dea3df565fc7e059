"""`lighthouse top`: the jobs of a lighthouse, live in a terminal."""
