"""The agent: what performs and judges a swap on the host itself.

It travels as a zipapp and runs as root under the host's own Python (3.9 or newer), so it uses the standard library
and pynvml only. `transaction` orders the steps, each step is a module of its own, `host.py` names the places.
"""
