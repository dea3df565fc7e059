"""The lighthouse's decisions: members and quorums of each job, and who receives which answer."""
