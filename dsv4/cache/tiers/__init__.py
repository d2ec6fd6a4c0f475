"""The prefix cache below the device: segments in host memory and in files."""
