"""REAP's sums measured on a checkpoint that fits no memory: layer after layer, expert by expert.

All sequences of a calibration text go through one layer before the next is read; what travels from
layer to layer (`state`) is a hundredth of the model. `run.observe` is the whole of it, `plan` tells
what it will cost.
"""
