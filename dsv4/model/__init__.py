"""The model: blocks, attention, experts and drafters. It orchestrates ops and does no arithmetic itself."""
