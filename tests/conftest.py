# SPDX-License-Identifier: Apache-2.0
"""Fixtures and the rule for CUDA tests.

A test that takes ``device`` runs on the CPU and, marked ``gpu``, on CUDA. Without a GPU the CUDA
twins are skipped with one reason; ``FUSED_OPS_REQUIRE_CUDA=1`` turns those skips into failures.

A worker of pytest-xdist takes its share of the cores, and first what has much to compile.
"""

import os

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if _WORKERS:  # before torch reads them; for the processes that tests start, too
    _CORES = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _CORES // _WORKERS)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import torch  # noqa: E402
from emulation.build import driver  # noqa: E402

_REASON = "needs a CUDA device, torch sees none"


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize(
            "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session"
        )


def pytest_collection_modifyitems(items):
    if _WORKERS:
        items.sort(key=lambda item: getattr(item.module, "driver", None) is not driver)
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
