# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the fused modules against the eager reference modules."""
