"""The KV cache: schema, block allocator, paged and per-request tensors, and their manager."""
