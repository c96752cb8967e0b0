# SPDX-License-Identifier: Apache-2.0
"""Cases H14 to H17: frozen weights, second derivatives, leaks, dropout, determinism."""

import gc
import weakref

import pytest
import torch
from helpers import assert_double_backward_raises, evaluate
from subjects import OPERATORS, OPS, build, inputs, msa
from torch.utils.checkpoint import checkpoint

from fused_ops.testing import peak_memory, relative_error

# H14: frozen weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_h14_frozen_weights(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 33, device=device)
    if op == "tensor_matmul":
        args[0], args[1] = args[0], args[1].detach().requires_grad_()
    cotangent = torch.randn_like(fused(*args))
    _, trainable = evaluate(fused, args, cotangent)

    def step(first):
        fused(first, *args[1:]).backward(cotangent)

    def peak():
        return peak_memory(lambda: step(args[0].detach().requires_grad_()), device)

    fused.zero_grad()
    everything = peak()
    fused.zero_grad()
    fused.requires_grad_(False)
    for other in args[1:]:
        other.requires_grad_(False)
        other.grad = None
    leaf = args[0].detach().requires_grad_()
    step(leaf)
    assert relative_error(leaf.grad, trainable["input 0"]) <= 2e-6
    assert all(p.grad is None for p in fused.parameters())
    assert all(other.grad is None for other in args[1:])
    assert peak() <= everything


# H15: second derivatives, leaks, inputs changed in place -----------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_h15_second_derivatives_raise(device, op):
    fused, _ = build(op, dtype=torch.float64, device=device)
    args = inputs(op, 4, (1,), torch.float64, device)
    assert_double_backward_raises(fused, args, OPERATORS[op].name)
    wanted = tuple(a for a in args if a.requires_grad)

    def call(*tensors):
        return fused(*tensors, *args[len(tensors) :])

    with pytest.raises(
        RuntimeError, match=f"{OPERATORS[op].name}: double backward is not supported"
    ):
        torch.autograd.gradgradcheck(call, wanted, fast_mode=True)


@pytest.mark.parametrize("op", OPS)
def test_h15_backward_twice_gives_twice_the_gradient(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)
    result = fused(*args)
    cotangent = torch.randn_like(result)
    result.backward(cotangent, retain_graph=True)
    leaves = [a for a in args if a.requires_grad] + list(fused.parameters())
    once = [leaf.grad.clone() for leaf in leaves]
    result.backward(cotangent)
    assert all(torch.equal(leaf.grad, 2 * g) for leaf, g in zip(leaves, once, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        result.backward(cotangent)


@pytest.mark.parametrize("op", OPS)
def test_h15_input_changed_in_place_raises(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 5, device=device)
    for i, original in enumerate(args):
        if original.dtype.is_floating_point and original.requires_grad:
            changed = original * 1
            result = fused(*args[:i], changed, *args[i + 1 :])
            changed.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
    for name, parameter in fused.named_parameters():
        result = fused(*args)
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
        assert parameter.grad is None, name


@pytest.mark.parametrize("op", OPS)
def test_h15_input_is_left_as_it_was(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)
    before = [a.detach().clone() for a in args]
    state = {name: t.clone() for name, t in fused.state_dict().items()}
    results = [fused(*args), fused.eval()(*args)]
    with torch.no_grad():
        results.append(fused(*args))
    with torch.inference_mode():
        results.append(fused(*args).clone())
    results[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
    assert all(torch.equal(t, state[name]) for name, t in fused.state_dict().items())
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("op", OPS)
def test_h15_memory_is_flat_over_fifty_forwards_without_backward(device, op):
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)

    def forwards(count):
        for _ in range(count):
            fused(*args)

    gc.collect()
    gc.disable()  # what only the cycle collector can free piles up on a GPU
    try:
        few, many = (peak_memory(lambda n=n: forwards(n), device) for n in (3, 50))
        assert few > 0
        assert many <= few
        given = args[0] * 1
        result = fused(given, *args[1:])
        node = result.grad_fn
        while not isinstance(node, torch.autograd.function.BackwardCFunction):  # transposes after
            node = node.next_functions[0][0]
        watched = weakref.ref(given), weakref.ref(result), weakref.ref(node)
        del given, result, node
        assert [w() for w in watched] == [None] * 3
    finally:
        gc.enable()


# H16: dropout ------------------------------------------------------------------------------------


def dropout_case(device, **options):
    fused, eager = msa(16, 8, 2, 0.25, device=device, **options)
    args = inputs("msa_row_attention", 9, (1,), device=device, sizes=(16, 8))
    return fused, args


def set_seed(device, seed):
    torch.manual_seed(seed)
    assert torch.initial_seed() == seed


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_h16_dropout_is_the_same_under_checkpointing(device, use_reentrant):
    fused, args = dropout_case(device)
    cotangent = torch.randn(1, 3, 9, 16, device=device)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fused

        def forward(self, *args):
            return checkpoint(self.inner, *args, use_reentrant=use_reentrant)

    def gradients(call):
        fused.zero_grad()
        leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        set_seed(device, 3)
        call(*leaves).backward(cotangent)
        found = [a.grad for a in leaves if a.requires_grad]
        return found + [p.grad.clone() for p in fused.parameters()]

    plain = gradients(fused)
    again = gradients(Checkpointed())
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    fused.eval()
    assert not torch.equal(plain[0], gradients(fused)[0])  # dropout was on


def test_h16_dropout_obeys_seeds_and_generator_states(device):
    fused, args = dropout_case(device)
    set_seed(device, 3)
    first, second = fused(*args), fused(*args)
    assert not torch.equal(first, second)
    set_seed(device, 3)
    assert torch.equal(fused(*args), first)
    module = torch.cuda if device == "cuda" else torch
    state = module.get_rng_state()
    third = fused(*args)
    assert not torch.equal(module.get_rng_state(), state)
    module.set_rng_state(state)
    assert torch.equal(fused(*args), third)
    set_seed(device, 4)
    assert not torch.equal(fused(*args), first)


@pytest.mark.parametrize("mode", ["eval", "p = 0"])
def test_h16_without_dropout_no_number_is_drawn(device, mode):
    fused, args = dropout_case(device)
    if mode == "eval":
        fused.eval()
    else:
        fused.dropout.p = 0.0
    module = torch.cuda if device == "cuda" else torch
    state = module.get_rng_state()
    assert torch.equal(fused(*args), fused(*args))
    assert torch.equal(module.get_rng_state(), state)


def test_h16_mean_of_3000_draws_is_the_result_without_dropout(device):
    fused, args = dropout_case(device)
    batch = [a.detach().expand(1000, *a.shape[1:]) for a in args]
    with torch.no_grad():
        draws = torch.cat([fused(*batch) for _ in range(3)])
        plain = fused.eval()(*[a.detach() for a in args])
    assert relative_error(draws.mean(0, keepdim=True), plain) < 5e-2
    # The spread of one draw: the reference's, from as many.
    assert draws.std(0).min() > 0
    _, eager = msa(16, 8, 2, 0.25, device=device)
    eager.load_state_dict(fused.state_dict())
    with torch.no_grad():
        theirs = torch.cat([eager.train()(*batch) for _ in range(3)])
    assert relative_error(draws.std(0), theirs.std(0)) < 5e-2
    assert len(draws.flatten(1).unique(dim=0)) == 3000


def test_h16_rows_queries_heads_and_batch_elements_draw_for_themselves(device):
    fused, _ = dropout_case(device)
    with torch.no_grad():
        fused.value.weight.copy_(torch.eye(16))
        fused.out_proj.weight.copy_(torch.eye(16))
    # Every residue is the same, so the results differ by what was dropped and nothing else.
    msa_repr = torch.randn(16, device=device).expand(2, 3, 64, 16)
    result = fused(msa_repr, torch.zeros(1, 64, 64, 8, device=device)) - fused.out_proj.bias
    share = (
        (
            result
            / fused.eval()(msa_repr, torch.zeros(1, 64, 64, 8, device=device)).sub(
                fused.out_proj.bias
            )
        )
        .unflatten(-1, (2, 8))
        .mean(-1)
    )  # (batch, row, query, head): the share of the weights kept
    shares = share.movedim(-1, 0).reshape(2, 6, 64)
    assert shares.std() > 0
    flat = shares.reshape(12, 64)
    correlations = torch.corrcoef(flat) - torch.eye(12, device=device)
    assert correlations.abs().max() < 0.7  # of 64 independent draws: 5.5 standard deviations


def test_h16_backward_uses_the_mask_of_its_forward(device):
    fused, args = dropout_case(device)
    result = fused(*args)
    cotangent = torch.randn_like(result)
    # The result less its bias is linear in the values' weight, so Euler's identity holds, but
    # only if forward and backward dropped the same weights.
    (gradient,) = torch.autograd.grad(result, fused.value.weight, cotangent)
    left = (gradient * fused.value.weight).sum().item()
    right = (cotangent * (result - fused.out_proj.bias)).sum().item()
    scale = (cotangent * (result - fused.out_proj.bias)).norm().item()
    assert abs(left - right) <= 1e-4 * scale
    other = (cotangent * (fused(*args) - fused.out_proj.bias)).sum().item()
    assert abs(left - other) > 1e-2 * scale


def test_h16_everything_dropped_leaves_the_bias(device):
    fused, args = dropout_case(device)
    fused.dropout.p = 1.0
    result = fused(*args)
    assert torch.equal(result, fused.out_proj.bias.expand_as(result))
    result.sum().backward()
    assert not args[0].grad.any()


# H17: deterministic mode -------------------------------------------------------------------------


@pytest.fixture
def deterministic(monkeypatch):
    """Deterministic mode; cuBLAS must be told as well, or torch refuses its products."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("op", OPS)
def test_h17_gradients_are_bitwise_equal_in_deterministic_mode(device, op, deterministic):
    fused, _ = build(op, device=device)
    args = inputs(op, 33, device=device)
    cotangent = torch.randn_like(fused(*args))
    # Deterministic mode also fills what torch.empty returns with NaN: nothing may be left of it.
    value, first = evaluate(fused, args, cotangent)
    assert torch.isfinite(value).all()
    for _ in range(20):
        again, grads = evaluate(fused, args, cotangent)
        assert torch.equal(again, value)
        for name, gradient in first.items():
            assert torch.isfinite(gradient).all(), name
            assert torch.equal(grads[name], gradient), name


@pytest.mark.parametrize("op", OPS)
def test_h17_deterministic_mode_changes_no_number(device, op, monkeypatch):
    fused, _ = build(op, device=device)
    args = inputs(op, 33, device=device)
    cotangent = torch.randn_like(fused(*args))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    value, grads = evaluate(fused, args, cotangent)
    torch.use_deterministic_algorithms(True)
    try:
        strict_value, strict_grads = evaluate(fused, args, cotangent)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(value, strict_value)
    assert all(torch.equal(strict_grads[name], g) for name, g in grads.items())


@pytest.mark.parametrize("op", OPS)
def test_h17_deterministic_under_compile(device, op, deterministic):
    torch._dynamo.reset()
    fused, _ = build(op, device=device)
    args = inputs(op, 9, device=device)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    cotangent = torch.randn_like(fused(*args))
    value, grads = evaluate(fused, args, cotangent)
    for _ in range(3):
        again, again_grads = evaluate(compiled, args, cotangent)
        assert torch.equal(again, value)
        for mine, other in zip(grads.values(), again_grads.values(), strict=True):
            assert torch.equal(mine, other)


def test_every_op_is_covered():
    assert set(OPS) == set(OPERATORS)
