"""The values that users import: parameters of requests, outputs, receipts, errors."""
