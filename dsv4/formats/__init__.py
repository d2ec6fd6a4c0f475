"""Number formats: FP8, FP4, scales, quantised tensors, weight layouts and cached rows."""
