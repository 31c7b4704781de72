"""What Kernelswap costs, measured on hosts of the lab: `make bench`. Not part of CI, where a busy machine would lie."""
