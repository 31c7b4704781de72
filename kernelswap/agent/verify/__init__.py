"""Judges a started server, a module for each kind of judgement. Nothing here changes the host."""
