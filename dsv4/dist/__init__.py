"""Communication between ranks: expert placement, exchange of rows, control messages, failures."""
