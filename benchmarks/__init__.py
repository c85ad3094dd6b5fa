"""Benchmarks: one module for each question, which declares its cases for one of the runners."""
