"""What a server tells of itself: metrics, the live view, the log; of each request a line and a trace."""
