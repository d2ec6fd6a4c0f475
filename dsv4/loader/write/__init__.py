"""Writing safetensors checkpoints: config.json, shards, and random models of any size."""
