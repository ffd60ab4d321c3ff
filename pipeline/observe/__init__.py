"""REAP's sums measured on a checkpoint that fits no memory: layer after layer, expert by expert.

All sequences of a calibration text go through one layer before the next is read; what travels from
layer to layer (`state`) grows with the text and not with the model. `run.observe` is the whole of
it, `plan` tells what it will cost.

What has been run: miniatures, on a CPU and on a GPU, against a reference that holds model and text
in memory; and layers of the released shapes with generated weights, for their time and memory. The
released weights have not been: `likelihood` is there to tell whether they give what they should.
"""
