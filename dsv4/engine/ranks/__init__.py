"""Several ranks: the step they agree on, the router, rank 0's and the others' ends, loading."""
