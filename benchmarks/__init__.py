# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the fused ops; ``python -m benchmarks`` runs them.

``case.py`` says what is measured and the four rooms' files list their shapes; ``opponents.py`` has
what ours is held against; ``timing.py`` and ``roofline.py`` the clocks and the machine's limits;
``measure.py`` puts one job together, ``suites.py`` all jobs in order; ``records.py`` is the JSON,
``report.py`` the table and ``plots.py`` the pictures made from the JSON.
"""
