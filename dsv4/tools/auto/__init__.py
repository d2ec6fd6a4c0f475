"""What `dsv4 serve` chooses by itself: what the machine has, what a model needs, and the settings that follow."""
