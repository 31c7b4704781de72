"""pyinfra operations: what is written to a host."""
