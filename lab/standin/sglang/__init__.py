"""A stand-in for SGLang, see launch_server.py."""

__version__ = "0.5.23"
