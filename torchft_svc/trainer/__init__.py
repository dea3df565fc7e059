"""A trainer that survives the loss of its workers: the last rung of fault tolerance."""
