"""The steps of a worker: quorum, state, heal, vote and decision."""
