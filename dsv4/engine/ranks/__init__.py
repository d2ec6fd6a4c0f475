"""The engine on several ranks: scheduler, messages, workers, loading."""
