"""Across the ranks of a tensor-parallel group: all-reduce, residual, norm and quantization in one.

Import :mod:`megatron_lowbit.collectives.all_reduce_norm`, which holds the operation.
"""
