# SPDX-License-Identifier: Apache-2.0
"""Fixtures and the rule for CUDA tests.

A test that takes ``device`` runs on the CPU and, marked ``gpu``, on CUDA. Without a GPU the CUDA
twins are skipped with one reason; ``FUSED_OPS_REQUIRE_CUDA=1`` turns those skips into failures.
"""

import os

import pytest
import torch

_REASON = "needs a CUDA device, torch sees none"


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session"
        )


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            if os.environ.get("FUSED_OPS_REQUIRE_CUDA") == "1":
                item.add_marker(pytest.mark.usefixtures("cuda_is_missing"))
            else:
                item.add_marker(pytest.mark.skip(reason=_REASON))


@pytest.fixture
def cuda_is_missing():
    pytest.fail(f"FUSED_OPS_REQUIRE_CUDA=1 but this test {_REASON}")


@pytest.fixture(autouse=True)
def _seed(request):
    """Every test draws the same fresh numbers whichever tests run beside it."""
    torch.manual_seed(hash_of(request.node.nodeid))
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an asynchronous error belongs to the test that caused it


def hash_of(text):
    """A small stable hash; Python's own differs from run to run."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
