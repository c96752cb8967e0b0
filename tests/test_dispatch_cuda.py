# SPDX-License-Identifier: Apache-2.0
"""What an op does on CUDA before and beside its kernels, tried with stand-ins on any machine."""

import contextlib
from typing import NamedTuple

import pytest
import torch
from helpers import opcheck
from subjects import DISPATCHED_OPS, OPERATORS, build, inputs
from torch.utils._python_dispatch import TorchDispatchMode

from fused_ops import _dispatch, _library
from fused_ops.triangular_multiplicative_update import composition


class Watcher(TorchDispatchMode):
    """Somebody who waits to see the ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Stub(NamedTuple):
    """As much of a tensor as is looked at before C++ takes a call."""

    is_cuda: bool = True
    requires_grad: bool = False


@pytest.mark.parametrize("op", ["triangular_multiplicative_update", "msa_row_attention"])
def test_a_cuda_call_of_an_op_with_kernels_goes_to_cpp_unseen(monkeypatch, op):
    """No checks and no plan in Python, where the C++ host op makes its own."""
    fused, _ = build(op)
    operator = OPERATORS[op]
    flat = fused._operands(*inputs(op, 5))
    flat[0] = Stub()
    monkeypatch.setattr(operator, "_forward_op", lambda *args: args)
    monkeypatch.setattr(operator, "_signature", lambda args: pytest.fail("looked at all tensors"))
    monkeypatch.setattr(operator, "_kernels", {("forward", "cuda"): True})
    with torch.no_grad():
        assert operator(*flat) == tuple(flat)
        flat[0] = Stub(is_cuda=False)
        with pytest.raises(pytest.fail.Exception):
            operator(*flat)
        flat[0] = Stub()
        operator._kernels["forward", "cuda"] = False  # a build without CUDA
        with pytest.raises(pytest.fail.Exception):
            operator(*flat)
        product = OPERATORS["tensor_matmul"]  # its plan is remembered: cuBLAS serves many calls
        monkeypatch.setattr(product, "_signature", lambda args: pytest.fail("as it should"))
        with pytest.raises(pytest.fail.Exception):
            product(Stub(), Stub(), "ieee", None)


@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_which_devices_have_kernels_is_asked_of_the_dispatcher(op):
    operator = OPERATORS[op]
    for which in ("forward", "backward"):
        for device in ("cpu", "cuda"):
            asked = torch._C._dispatch_has_kernel_for_dispatch_key(
                f"fused_ops::{op}_{which}", device.upper()
            )
            assert operator._has_kernel(which, device) is asked


@pytest.fixture
def device_backward(monkeypatch):
    """The triangular update with a stand-in for its backward on CUDA, used on the CPU: the list of
    its calls, and whether it answers."""
    operator = OPERATORS["triangular_multiplicative_update"]
    calls, answers = [], [True]

    def backward(*args):
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        calls.append(args)
        return operator._compose_backward(*args) if answers[0] else None

    monkeypatch.setattr(operator, "_device_backward", backward)
    monkeypatch.setattr(operator, "_is_for_device_backward", lambda result, args: True)
    monkeypatch.setattr(operator, "_known", {})
    return calls, answers


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", ["eager", "watched", "compiled", "left to the composition"])
def test_the_backward_of_a_device_serves_every_way(device_backward, way, autocast):
    calls, answers = device_backward
    op = "triangular_multiplicative_update"
    fused, _ = build(op)
    args = inputs(op, 5)
    wanted = [args[0], *fused.parameters()]
    answers[0] = way != "left to the composition"
    call = torch.compile(fused, fullgraph=True, backend="aot_eager") if way == "compiled" else fused
    torch._dynamo.reset()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = call(*args)
        context = Watcher() if way == "watched" else contextlib.nullcontext()
        cotangent = torch.randn_like(result)
        with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            grads = torch.autograd.grad(result, wanted, cotangent)
        assert torch.equal(calls[-1][0], cotangent)
        assert calls[-1][-1] == [True] * len(OPERATORS[op].differentiable)
        with torch.no_grad():
            expected = OPERATORS[op]._compose_backward(*calls[-1])
        in_order = dict(zip(composition.DIFFERENTIABLE, expected, strict=True))
        assert torch.equal(grads[0], in_order["pair"])
        for (name, _), grad in zip(fused.named_parameters(), grads[1:], strict=True):
            assert torch.equal(grad, in_order[name.replace(".", "_")]), name
    assert len(calls) == 2


def test_the_backward_of_a_device_passes_opcheck(device_backward):
    op = "triangular_multiplicative_update"
    fused, _ = build(op)
    opcheck(OPERATORS[op], fused._operands(*inputs(op, 4, (1,))))
    assert device_backward[0]


def test_the_backward_of_a_device_is_for_cuda_with_a_library_and_a_plan(monkeypatch):
    op = "triangular_multiplicative_update"
    operator = OPERATORS[op]
    fused, _ = build(op)
    flat = fused._operands(*inputs(op, 5))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    plan = {True: "kernel", False: "composition"}
    monkeypatch.setattr(_library, "plan", lambda *args: {"path": plan[args[-1]]})
    monkeypatch.setattr(_library, "cuda_library_status", _library.Status(True, ""))
    on_cuda = _dispatch.Result((2, 5, 5, 8), torch.float32, torch.device("cuda"))
    on_cpu = on_cuda._replace(device=torch.device("cpu"))
    monkeypatch.setattr(operator, "_device_backward", None)
    assert not operator._is_for_device_backward(on_cuda, flat)
    monkeypatch.setattr(operator, "_device_backward", lambda *args: None)
    assert operator._is_for_device_backward(on_cuda, flat)
    assert not operator._is_for_device_backward(on_cpu, flat)
    plan[True] = "composition"
    assert not operator._is_for_device_backward(on_cuda, flat)
    plan[True] = "kernel"
    monkeypatch.setattr(_library, "cuda_library_status", _library.Status(False, "none"))
    assert not operator._is_for_device_backward(on_cuda, flat)


class Nothing(torch.autograd.Function):
    """Passes on that there is no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_where_no_gradient_comes_none_goes_on(monkeypatch, op, saves):
    """As of PyTorch's own ops; whether or not the forward has saved anything."""
    fused, _ = build(op)
    operator = OPERATORS[op]
    if saves:
        run = operator._run_forward
        monkeypatch.setattr(operator, "_run_saving", lambda args: (run(args), torch.ones(3)))
    first, *others = inputs(op, 5)
    result = fused(first.requires_grad_(), *others)
    assert len(result.grad_fn.saved_tensors) == len(operator._tensors) + saves
    wanted = [first, *fused.parameters()]
    grads = torch.autograd.grad(Nothing.apply(result).sum(), wanted, allow_unused=True)
    assert all(grad is None for grad in grads)
