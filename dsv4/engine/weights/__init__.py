"""New weights for a model that runs: where they come from, how they are checked, and how they are written in place."""
