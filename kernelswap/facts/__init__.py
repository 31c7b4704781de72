"""pyinfra facts: what is read from a host. A fact changes nothing there."""
