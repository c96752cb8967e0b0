# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version; setup.py reads it without importing the package."""

__version__ = "0.1.0"
