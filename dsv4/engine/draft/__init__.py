"""Speculative decoding: drafter, verification, and the policy for the number of drafts."""
