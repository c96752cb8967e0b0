# SPDX-License-Identifier: Apache-2.0
"""Cases H09 to H13: masked rows, dtype mixes, weak tests, the fp16 range, TF32."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers import (
    ROUNDING,
    as_double,
    assert_gradients,
    assert_result,
    evaluate,
    in_double,
)
from subjects import MASKED_OPS, OPERATORS, OPS, build, inputs, ipa, msa, randn, tri
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fused_ops
from fused_ops.testing import median_time, relative_error

TF32 = 2**-11  # rounding of a TF32 operand

# H09: fully masked rows --------------------------------------------------------------------------

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_h09_msa_row_without_keys_is_zero_and_leaves_the_others_alone(device, dtype):
    fused, _ = msa(8, 6, 2, dtype=dtype, device=device)
    args = inputs("msa_row_attention", 9, (1,), dtype, device, rows=4)
    full = torch.ones(1, 4, 9, device=device)
    holed = full.clone()
    holed[0, 2] = 0
    cotangent = torch.randn(1, 4, 9, 8, device=device).to(dtype)
    value, grads = evaluate(fused, [*args[:2], holed], cotangent)
    full_value, full_grads = evaluate(fused, [*args[:2], full], cotangent)
    assert torch.isfinite(value).all()
    assert all(torch.isfinite(g).all() for g in grads.values())
    others = [0, 1, 3]
    assert torch.equal(value[:, others], full_value[:, others])
    assert torch.equal(grads["input 0"][:, others], full_grads["input 0"][:, others])
    # Attention output zero: what remains of the row is the bias, which no key or query moves.
    assert torch.equal(value[0, 2], fused.out_proj.bias.expand(9, 8))
    assert not grads["input 0"][:, 2].any()
    # Parameters and pair see the other rows only.
    _, without = evaluate(
        fused, [args[0].detach()[:, others], args[1], full[:, others]], cotangent[:, others]
    )
    for name, gradient in without.items():
        if name not in ("input 0", "out_proj.bias"):
            tolerance = max(8 * ROUNDING[dtype], 2e-6 if dtype == torch.float32 else 0)
            assert relative_error(grads[name], gradient) <= tolerance, name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h09_mask_of_zeros_stays_finite(device, op, dtype):
    fused, _ = build(op, dtype=dtype, device=device)
    *tensors, mask = inputs(op, 9, (2,), dtype, device)
    nothing = mask.clone()
    nothing[0] = 0
    cotangent = torch.randn_like(fused(*tensors, mask))
    value, grads = evaluate(fused, [*tensors, nothing], cotangent)
    other_value, other_grads = evaluate(fused, [*tensors, mask], cotangent)
    assert torch.isfinite(value).all()
    for name, gradient in grads.items():
        assert torch.isfinite(gradient).all(), name
    assert relative_error(value[1], other_value[1]) <= ROUNDING[dtype]
    same = grads["input 0"][1], other_grads["input 0"][1]
    assert relative_error(*same) <= 4 * ROUNDING[dtype]


def test_h09_attention_over_no_residue_is_zero(device):
    fused, _ = ipa(12, 6, 3, 2, 3, device=device)
    *tensors, mask = inputs("invariant_point_attention", 9, (1,), device=device)
    value = fused(*tensors, torch.zeros_like(mask))
    assert torch.equal(value, fused.out_proj.bias.expand_as(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h09_mask_of_zeros_stays_finite_under_autocast(device, op, dtype):
    fused, _ = build(op, device=device)
    *tensors, mask = inputs(op, 9, device=device)
    with torch.autocast(device, dtype=dtype):
        value = fused(*tensors, torch.zeros_like(mask))
        assert torch.isfinite(value).all()
        grads = torch.autograd.grad(value.float().square().sum(), list(tensors))
    assert all(torch.isfinite(g).all() for g in grads)


# H10: mixed dtypes of masks, weights and inputs --------------------------------------------------

MASK_DTYPES = [torch.bool, torch.uint8, torch.int64, torch.half, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h10_masks_of_all_dtypes_are_equal(device, op, autocast):
    fused, _ = build(op, device=device)
    *tensors, mask = inputs(op, 9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        expected = fused(*tensors, mask)
        for dtype in MASK_DTYPES:
            assert torch.equal(fused(*tensors, mask.to(dtype)), expected), dtype
        assert torch.equal(fused(*tensors, torch.ones_like(mask)), fused(*tensors, None))
        assert torch.equal(fused(*tensors, None), fused(*tensors))
    assert not torch.equal(expected, fused(*tensors, None).to(expected.dtype))


@pytest.mark.parametrize("mixed", ["fp32 parameters", "fp32 norms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", MASKED_OPS)
def test_h10_parameters_stay_in_float32_beside_16_bit_activations(device, op, dtype, mixed):
    fused, eager = build(op, device=device)
    if mixed == "fp32 norms":
        for child in fused.children():  # shares its parameters with eager, in the new dtype too
            if not isinstance(child, torch.nn.LayerNorm):
                child.to(dtype)
    args = inputs(op, 9, (2,), dtype, device)
    result = fused(*args)
    assert result.dtype == dtype
    cotangent = torch.randn_like(result)
    ours, grads = evaluate(fused, args, cotangent)
    theirs, their_grads = evaluate(copy.deepcopy(eager).to(dtype), args, cotangent)
    exact, exact_grads = evaluate(in_double(eager), [as_double(a) for a in args], cotangent)
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(grads, their_grads, exact_grads, dtype)
    for name, parameter in fused.named_parameters():
        assert grads[name].dtype == parameter.dtype, name
    for i, a in enumerate(args):
        if a.requires_grad:
            assert grads[f"input {i}"].dtype == a.dtype


def test_h10_matrix_of_another_dtype(device):
    a = randn(2, 5, 8, dtype=torch.bfloat16, device=device)
    b = randn(8, 7, device=device)
    result = fused_ops.tensor_matmul(a, b)
    assert result.dtype == torch.bfloat16
    assert relative_error(result, a.double() @ b.double()) <= 2 * ROUNDING[torch.bfloat16]
    result.sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("op", ["msa_row_attention", "invariant_point_attention"])
def test_h10_activations_of_two_dtypes_are_a_type_error_that_names_both(device, op):
    fused, _ = build(op, dtype=torch.bfloat16, device=device)
    args = inputs(op, 5, (1,), torch.bfloat16, device)
    args[1] = args[1].detach().float()
    text = rf"{op}: pair must have the dtype of \w+.*torch\.bfloat16, got torch\.float32"
    with pytest.raises(TypeError, match=text):
        fused(*args)
    with torch.autocast(device, dtype=torch.bfloat16):  # autocast is there to allow just this
        mixed = fused(*args)
        args[1] = args[1].bfloat16()
        assert relative_error(mixed, fused(*args)) <= 4 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("op", OPS)
def test_h10_float64_mixes_with_nothing(op):
    fused, _ = build(op)
    args = inputs(op, 5, dtype=torch.float64)
    if op == "tensor_matmul":
        args[1] = args[1].float()
    with pytest.raises(TypeError, match=rf"{op}: \w+ must be float64 when \w+ is torch\.float64"):
        fused(*args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_h10_autocast_is_obeyed(device, op, dtype):
    fused, eager = build(op, device=device)
    args = inputs(op, 9, device=device)
    with torch.autocast(device, dtype=dtype):
        result = fused(*args)
        cotangent = torch.randn_like(result)
        ours, grads = evaluate(fused, args, cotangent)
        theirs, their_grads = evaluate(eager, args, cotangent)
    assert ours.dtype == theirs.dtype == dtype
    exact, exact_grads = evaluate(in_double(eager), [as_double(a) for a in args], cotangent)
    assert_result(ours, theirs, exact, dtype)
    assert_gradients(grads, their_grads, exact_grads, dtype)
    assert all(g.dtype == torch.float32 for g in grads.values())


# H11: bf16 attention that fails now and then, and tests too weak to see it -----------------------


@pytest.mark.parametrize("op", MASKED_OPS)
def test_h11_bf16_error_of_fifty_seeds(device, op):
    for seed in range(50):
        torch.manual_seed(seed)
        fused, eager = build(op, dtype=torch.bfloat16, device=device)
        args = inputs(op, 16, (1,), torch.bfloat16, device)
        cotangent = torch.randn_like(fused(*args))
        ours, grads = evaluate(fused, args, cotangent)
        theirs, their_grads = evaluate(eager, args, cotangent)
        exact, exact_grads = evaluate(in_double(eager), [as_double(a) for a in args], cotangent)
        assert relative_error(ours, exact) <= 2 * relative_error(theirs, exact) + 1e-3, seed
        assert_gradients(grads, their_grads, exact_grads, torch.bfloat16)


def test_h11_the_tolerances_reject_small_and_missing_gradients():
    """What a mean loss would hide: gradients of zeros, and gradients that are off by a percent."""
    fused, eager = msa(8, 6, 2)
    args = inputs("msa_row_attention", 16, (1,))
    value, grads = evaluate(fused, args, torch.randn(1, 3, 16, 8))
    exact = {name: g.double() for name, g in grads.items()}
    assert_gradients(grads, grads, exact, torch.float32)
    for name in grads:
        for wrong in (torch.zeros_like(grads[name]), grads[name] * 1.01):
            with pytest.raises(AssertionError, match=f"gradient of {name}"):
                assert_gradients({**grads, name: wrong}, grads, exact, torch.float32)
    with pytest.raises(AssertionError, match="error"):
        assert_result(value * 1.001, value, value.double(), torch.float32)


# H12: the range of fp16 --------------------------------------------------------------------------


@pytest.mark.parametrize("outgoing", [True, False])
def test_h12_sums_beyond_the_range_of_fp16(device, outgoing):
    fused, eager = tri(16, 8, outgoing, device=device)
    with torch.no_grad():
        for name in ("proj_a", "proj_b"):
            getattr(eager, name).weight.mul_(40)
            getattr(eager, name).bias.add_(60)
    pair, mask = randn(1, 96, 96, 16, device=device), torch.ones(1, 96, 96, device=device)
    with torch.no_grad():
        x = eager.layer_norm_in(pair)
        a = eager.proj_a(x) * torch.sigmoid(eager.gate_a(x))
        b = eager.proj_b(x) * torch.sigmoid(eager.gate_b(x))
        form = "bikh,bjkh->bijh" if outgoing else "bkih,bkjh->bijh"
        assert torch.einsum(form, a, b).abs().max() > 65504
    half = copy.deepcopy(fused).half()
    low = pair.detach().half().requires_grad_()
    result = half(low, mask)
    assert torch.isfinite(result).all()
    expected = copy.deepcopy(eager).half().double()(low.detach().double(), mask)
    assert relative_error(result, expected) < 3e-2
    grads = torch.autograd.grad(half(low, mask), [low, *half.parameters()], torch.randn_like(low))
    assert all(torch.isfinite(g).all() for g in grads)
    with torch.autocast(device, dtype=torch.float16):
        assert relative_error(fused(pair, mask), in_double(eager)(pair.double(), mask)) < 3e-2


def test_h12_logits_beyond_the_range_of_fp16(device):
    fused, eager = msa(16, 6, 2, device=device)
    with torch.no_grad():
        eager.query.weight.mul_(300)
        eager.key.weight.mul_(300)
    args = inputs("msa_row_attention", 24, (1,), torch.float16, device, sizes=(16, 6))
    half = copy.deepcopy(fused).half()
    exact_module = copy.deepcopy(eager).half().double()
    doubles = [as_double(a) for a in args]
    x = exact_module.layer_norm(doubles[0])
    q, k = exact_module.query(x), exact_module.key(x)
    assert (q @ k.transpose(-1, -2)).abs().max() > 65504
    result = half(*args)
    assert torch.isfinite(result).all()
    exact = exact_module(*doubles)

    class Rounded(torch.nn.Module):
        """q and k can only be as good as fp16 holds them: what that alone costs."""

        def forward(self, x):
            return (x @ self.weight.t()).half().double()

    for name in ("query", "key"):
        rounded = Rounded()
        rounded.weight = getattr(exact_module, name).weight
        setattr(exact_module, name, rounded)
    cost = relative_error(exact_module(*doubles), exact)
    assert relative_error(result, exact) < 1e-2 + 1.5 * cost
    wanted = [a for a in args if a.requires_grad] + list(half.parameters())
    grads = torch.autograd.grad(result, wanted, torch.randn_like(result))
    assert all(not torch.isnan(g).any() for g in grads)


# H13: fp32 silently done in TF32 -----------------------------------------------------------------


@pytest.fixture
def fp32_precision():
    """Leaves the process's setting as it was."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    torch.set_float32_matmul_precision("highest")
    setting.fp32_precision = before


SETTERS = {
    "fp32_precision": lambda on: setattr(
        torch.backends.cuda.matmul, "fp32_precision", "tf32" if on else "ieee"
    ),
    "allow_tf32": lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on),
    "set_float32_matmul_precision": lambda on: torch.set_float32_matmul_precision(
        "high" if on else "highest"
    ),
}


class Recorder(TorchDispatchMode):
    """Notes the precision argument of every op of this library that is dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_ops":
            names = [a.name for a in func._schema.arguments]
            self.seen.append((func._opname, args[names.index("precision")]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("op", OPS)
def test_h13_the_flag_reaches_forward_and_backward(fp32_precision, op, setter):
    fused, _ = build(op)
    args = inputs(op, 5, (1,))
    for on in (False, True):
        SETTERS[setter](on)
        with Recorder() as recorder:
            result = fused(*args)
            SETTERS[setter](not on)  # the backward goes by what the forward went by
            result.sum().backward()
        expected = "tf32" if on else "ieee"
        name = OPERATORS[op].name
        assert recorder.seen == [(f"{name}_forward", expected), (f"{name}_backward", expected)]


def test_h13_the_flag_decides_the_kernel(fp32_precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        a, b = torch.empty(64, 32, device="cuda"), torch.empty(32, 16, device="cuda")
        fp32_precision.fp32_precision = "ieee"
        assert fused_ops.explain(fused_ops.TensorMatmul(), a, b).path == "kernel"
        fp32_precision.fp32_precision = "tf32"
        assert fused_ops.explain(fused_ops.TensorMatmul(), a, b).path == "cublas"
        fixed = fused_ops.TensorMatmul(precision="ieee")
        assert fused_ops.explain(fixed, a, b).path == "kernel"


def test_h13_import_changes_no_setting():
    script = """
import torch
def settings():
    return (
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision,
        torch.backends.fp32_precision, torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
    )
before = settings()
import fused_ops
assert settings() == before, (settings(), before)
torch.backends.cuda.matmul.fp32_precision = "tf32"
fused_ops.TensorMatmul(precision="ieee")(torch.ones(2, 3), torch.ones(3, 4))
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    root = os.path.dirname(os.path.dirname(fused_ops.__file__))
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("op", OPS)
def test_h13_the_flag_is_obeyed_by_every_product(fp32_precision, op, setter):
    sizes = {
        "tensor_matmul": (),
        "triangular_multiplicative_update": (64, 64),
        "triangle_attention": (64, 2, 16, "ending"),
        "msa_row_attention": (64, 32, 2),
        "invariant_point_attention": (64, 32, 8, 4, 4),
    }[op]
    fused, eager = build(op, *sizes, device="cuda")
    # Beyond what small problems' kernels take, which have fp32's accuracy always.
    args = inputs(op, 200, (1,), device="cuda", sizes=sizes)
    if op == "tensor_matmul":
        args = [randn(64, 128, 256, device="cuda"), randn(256, 256, device="cuda")]
    cotangent = torch.randn_like(fused(*args))
    exact, exact_grads = evaluate(in_double(eager), [as_double(a) for a in args], cotangent)
    SETTERS[setter](False)
    value, grads = evaluate(fused, args, cotangent)
    theirs, their_grads = evaluate(eager, args, cotangent)
    assert relative_error(value, exact) < 5e-6
    assert_result(value, theirs, exact, torch.float32)
    assert_gradients(grads, their_grads, exact_grads, torch.float32)
    SETTERS[setter](True)
    fast_value, fast_grads = evaluate(fused, args, cotangent)
    theirs, their_grads = evaluate(eager, args, cotangent)
    assert relative_error(fast_value, exact) < 5e-3
    assert relative_error(fast_value, exact) > TF32 / 64  # it did use the units it was allowed
    assert_result(fast_value, theirs, exact, torch.bfloat16)
    for name, gradient in exact_grads.items():
        assert math.isfinite(relative_error(fast_grads[name], gradient)), name
        off = (fast_grads[name].double() - gradient).norm()
        allowed = 2 * (their_grads[name].double() - gradient).norm() + 4 * TF32 * gradient.norm()
        assert off <= allowed + 1e-6, name


@pytest.mark.gpu
def test_h13_tf32_is_faster_where_it_is_allowed(fp32_precision):
    a = torch.randn(4, 128, 256, 256, device="cuda")
    b = torch.randn(256, 768, device="cuda")
    times = {}
    for precision in ("ieee", "tf32"):
        fp32_precision.fp32_precision = precision
        times[precision] = median_time(lambda: fused_ops.tensor_matmul(a, b), "cuda")
    assert times["tf32"] < times["ieee"]
