"""The engine: requests in, steps over the model, tokens out."""
