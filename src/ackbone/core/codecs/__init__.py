"""Wire forms: how a message is written as bytes and headers, and read back."""
