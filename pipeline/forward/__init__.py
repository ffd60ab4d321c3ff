"""The forward pass of DeepSeek-V4.1-Flash's text trunk in torch: pure functions, one noun each.

They compute in the type of the values that they are given, and matrix products in the type of the
matrix (`linear`). Rules: the release's inference/model.py and inference/engram.py, as their prefill
computes, without the rounding of activations that the published kernels do.
"""
