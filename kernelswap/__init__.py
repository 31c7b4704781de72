"""Kernelswap: swap the kernel backend of an SGLang server as a declared, verified and reversible transaction."""

__version__ = "0.1.0"
