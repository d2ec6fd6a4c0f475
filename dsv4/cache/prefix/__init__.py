"""The prefix cache on the device: hash tree, snapshots, hits."""
