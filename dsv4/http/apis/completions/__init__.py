"""`POST /v1/completions`: the continuation of a text."""
