"""The agent: what performs and judges a swap on the host itself.

It travels as a zipapp and runs as root under the host's own Python (3.9 or newer), so it uses the standard library
and pynvml only. `transaction` has the steps of a swap in their order, the way back and the journal; what a step looks
at or judges is a module of its own. `host` names the places.
"""
