"""How an agent meets the other agents of its run: at a lighthouse."""
