"""Tools behind the commands: plan, bench, audit, quantize, receipts, self-test, evaluation."""
