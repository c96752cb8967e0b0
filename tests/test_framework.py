# SPDX-License-Identifier: Apache-2.0
"""What all ops promise to the framework around them."""

import copy
import inspect
import re
import warnings

import pytest
import torch
from helpers import evaluate, randomize
from subjects import (
    DISPATCHED_OPS,
    MASKED_OPS,
    MODULES,
    OPERATORS,
    OPS,
    SIZES,
    build,
    inputs,
    operands,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fused_ops
from fused_ops import _dispatch, functional, reference

# Modules and the reference -----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_state_dict_and_constructor_are_the_references(op):
    fused, eager = getattr(fused_ops, MODULES[op]), getattr(reference, MODULES[op])
    mine, theirs = fused(*SIZES[op]).state_dict(), eager(*SIZES[op]).state_dict()
    assert list(mine) == list(theirs)
    assert [t.shape for t in mine.values()] == [t.shape for t in theirs.values()]
    ours = list(inspect.signature(fused).parameters.values())
    more = [p for p in ours if p.kind == inspect.Parameter.KEYWORD_ONLY]
    if op != "tensor_matmul":
        assert [(p.name, p.default) for p in ours[: -len(more)]] == [
            (p.name, p.default) for p in inspect.signature(eager).parameters.values()
        ]
        assert all(p.default is None for p in more)
    assert (ours[-1].name, ours[-1].kind) == ("precision", inspect.Parameter.KEYWORD_ONLY)
    assert inspect.signature(fused.forward).parameters.keys() == (
        inspect.signature(eager.forward).parameters.keys()
    )
    torch.manual_seed(0)
    mine = fused(*SIZES[op]).state_dict()
    torch.manual_seed(0)
    theirs = eager(*SIZES[op]).state_dict()  # also drawn alike
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_from_reference_shares_parameters_and_mode(op, training):
    eager = randomize(getattr(reference, MODULES[op])(*SIZES[op])).train(training)
    for parameter in list(eager.parameters())[::2]:
        parameter.requires_grad_(False)
    state = torch.get_rng_state()
    fused = getattr(fused_ops, MODULES[op]).from_reference(eager, precision="ieee")
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn only to be thrown away
    assert fused.training is training and fused.precision == "ieee"
    for (name, mine), (other, theirs) in zip(
        fused.named_parameters(), eager.named_parameters(), strict=True
    ):
        assert name == other and mine is theirs, name
    assert all(child.training is training for child in fused.children())


@pytest.mark.parametrize("op", MASKED_OPS)
def test_from_reference_refuses_what_does_not_fit(op):
    cls = getattr(fused_ops, MODULES[op])
    with pytest.raises(TypeError, match=rf"{MODULES[op]}.from_reference: module must .*got Linear"):
        cls.from_reference(nn.Linear(2, 2))
    eager = getattr(reference, MODULES[op])(*SIZES[op])
    eager.extra = nn.Linear(2, 2)
    with pytest.raises((RuntimeError, AttributeError, TypeError), match="extra"):
        cls.from_reference(eager)
    with pytest.raises(ValueError, match=f"{op}: precision must be .*'fp8'"):
        cls.from_reference(getattr(reference, MODULES[op])(*SIZES[op]), precision="fp8")


@pytest.mark.parametrize("op", MASKED_OPS)
def test_from_reference_takes_over_eps(op):
    eager = randomize(getattr(reference, MODULES[op])(*SIZES[op]))
    for child in eager.children():
        if isinstance(child, nn.LayerNorm):
            child.eps = 0.1
    args = inputs(op, 5)
    fused = getattr(fused_ops, MODULES[op]).from_reference(eager)
    torch.testing.assert_close(fused(*args), eager(*args), atol=1e-4, rtol=1e-4)


# Names and documentation -------------------------------------------------------------------------


@pytest.mark.parametrize("module", [fused_ops, functional, reference], ids=lambda m: m.__name__)
def test_public_names_exist_and_are_documented(module):
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        if name == "__version__":
            assert re.fullmatch(r"\d+\.\d+\.\d+", value)
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value) and issubclass(value, nn.Module):
            assert value.forward.__doc__, f"{name}.forward"
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"
    assert set(functional.__all__) == set(OPS)


# explain() ---------------------------------------------------------------------------------------


def on_device(module, device):
    """Gives ``module`` uninitialised parameters on a device that may be fake."""
    for child in module.modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                child._parameters[key] = nn.Parameter(empty)
    return module


def fake_case(op, mode, device="cuda", dtype=torch.float32, n=5):
    """A module of ``op`` and arguments for it, all fake."""
    fused, _ = build(op, dtype=dtype)
    args = inputs(op, n, dtype=dtype, grad=False)
    with mode:
        on_device(fused, device)
        return fused, [torch.empty(a.shape, dtype=a.dtype, device=device) for a in args]


@pytest.fixture
def hopper(monkeypatch):
    """A machine whose GPU, as far as anyone can ask, is an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_explain_on_the_cpu(op, backward):
    fused, _ = build(op)
    told = fused_ops.explain(fused, *inputs(op, 5), backward=backward)
    name = OPERATORS[op].name
    assert told.op == name and told.path == "composition" and told.kernel is None
    assert told.launches is None and told.workspace_bytes == 0
    assert told.reasons == ("CPU tensors",)
    assert str(told) == f"{name}: PyTorch composition (CPU tensors)"


@pytest.mark.skipif(
    "90a" not in [str(a).removesuffix("+PTX") for a in fused_ops._library.build_info()["archs"]],
    reason="not built for sm_90a",
)
def test_explain_names_the_kernel_of_an_fp32_matmul(hopper):
    mode = FakeTensorMode()
    with mode:
        a, b = torch.empty(8, 64, 33, device="cuda"), torch.empty(33, 17, device="cuda")
        told = fused_ops.explain(fused_ops.TensorMatmul(precision="ieee"), a, b)
    assert told.path == "kernel" and told.reasons == ()
    assert told.launches == 1 and len(told.tile) == 3
    for text in ("tensor_matmul: kernel", told.kernel, "x".join(map(str, told.tile))):
        assert text in str(told)


@pytest.mark.parametrize("op", OPS)
def test_explain_runs_nothing_and_draws_nothing(hopper, op):
    mode = FakeTensorMode()
    fused, args = fake_case(op, mode)
    if hasattr(fused, "dropout"):
        fused.dropout.p = 0.5
    before = torch.get_rng_state()
    with mode, torch.profiler.profile() as profile:
        told = fused_ops.explain(fused, *args)
    assert told.op == OPERATORS[op].name
    assert torch.equal(torch.get_rng_state(), before)
    assert not [
        e.key for e in profile.key_averages() if e.key.startswith(("fused_ops::", "aten::r"))
    ]


def test_explain_refuses_other_modules_and_bad_inputs():
    with pytest.raises(
        TypeError, match=r"explain: module must be a module of fused_ops, got Linear"
    ):
        fused_ops.explain(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"tensor_matmul: b must have shape .*got \(4, 5\)"):
        fused_ops.explain(fused_ops.TensorMatmul(), torch.ones(2, 3), torch.ones(4, 5))


# Fake and meta tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_fake_cuda_results_and_gradients(hopper, op, dtype):
    mode = FakeTensorMode()
    fused, args = fake_case(op, mode, dtype=dtype)
    real, _ = build(op, dtype=dtype)
    expected = real(*inputs(op, 5, dtype=dtype))
    with mode, torch.no_grad():
        result = fused(*args)
        assert (result.shape, result.dtype) == (expected.shape, dtype)
        assert result.device.type == "cuda"
        flat = operands(op, fused, args)
        positions = OPERATORS[op].differentiable
        for wanted in (positions, positions[:1], positions[-1:]):
            needs = [i in wanted and flat[i] is not None for i in positions]
            backward = getattr(torch.ops.fused_ops, f"{OPERATORS[op].name}_backward")
            grads = backward(torch.empty_like(result), *flat, needs)
            tensors = [flat[i] for i, need in zip(positions, needs, strict=True) if need]
            assert len(grads) == len(tensors)
            for gradient, tensor in zip(grads, tensors, strict=True):
                assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype
                assert gradient.device == tensor.device


@pytest.mark.parametrize("op", OPS)
def test_meta_module_gives_meta_results_and_gradients(op):
    fused, _ = build(op)
    expected = fused(*inputs(op, 5))
    fused = copy.deepcopy(fused).to("meta")
    args = [a.detach().to("meta").requires_grad_(a.requires_grad) for a in inputs(op, 5)]
    result = fused(*args)
    assert result.is_meta and (result.shape, result.dtype) == (expected.shape, expected.dtype)
    result.sum().backward()
    assert all(a.grad.is_meta and a.grad.shape == a.shape for a in args if a.requires_grad)
    assert all(p.grad.shape == p.shape for p in fused.parameters())
    assert fused_ops.explain(fused, *args).path == "composition"


# Export, functional transforms, modes ------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_exports(op, strict):
    fused, _ = build(op)
    args = inputs(op, 5, grad=False)
    with torch.no_grad():
        program = torch.export.export(fused.eval(), tuple(args), strict=strict)
        fresh = inputs(op, 5, grad=False)
        assert torch.equal(program.module()(*fresh), fused(*fresh))
    calls = [n for n in program.graph.nodes if "fused_ops" in str(n.target)]
    assert len(calls) == 1


@pytest.mark.parametrize("op", OPS)
def test_functional_gradient_is_the_gradient(op):
    fused, _ = build(op)
    args = inputs(op, 5)
    expected = torch.autograd.grad(fused(*args).sum(), args[0])[0]
    plain = [a.detach() for a in args]

    def loss(first):
        return fused(first, *plain[1:]).sum()

    assert torch.equal(torch.func.grad(loss)(plain[0]), expected)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(plain[0])


@pytest.mark.parametrize("op", OPS)
def test_vmap_is_right_or_raises(op):
    fused, _ = build(op)
    args = [a.detach() for a in inputs(op, 5, (3,))]
    dims = tuple(None if op == "tensor_matmul" and i == 1 else 0 for i in range(len(args)))
    try:
        with torch.no_grad():
            result = torch.func.vmap(fused, in_dims=dims)(*args)
    except RuntimeError as error:
        assert "vmap" in str(error) or "batching rule" in str(error)
    else:
        torch.testing.assert_close(result, fused(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_inference_mode(op):
    fused, _ = build(op)
    args = inputs(op, 5)
    expected = fused(*args)
    with torch.inference_mode():
        result = fused(*args)
        assert result.is_inference() and torch.equal(result, expected)
        made_inside = inputs(op, 5)
        assert torch.equal(fused(*made_inside), fused(*[a.clone() for a in made_inside]))


@pytest.mark.parametrize("op", OPS)
def test_without_gradients_a_call_is_one_dispatch(op):
    fused, _ = build(op)
    args, name = inputs(op, 5), OPERATORS[op].name

    def recorded(context):
        with context, torch.profiler.profile() as profile:
            fused(*args)
        return [e.key for e in profile.events()]

    for context in (torch.no_grad(), torch.inference_mode()):
        names = recorded(context)
        assert [n for n in names if n.startswith("fused_ops::")] == [f"fused_ops::{name}_forward"]
        assert not [n for n in names if "autograd" in n.lower() or "Backward" in n]
    with_gradients = recorded(torch.enable_grad())
    assert f"{name}_autograd" in with_gradients  # the name the check above must not find


class Seen(TorchDispatchMode):
    """Writes down what reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Writes down what is called from Python."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def names_seen(watcher, fused, args):
    """What a watcher of a call sees of it."""
    if watcher == "profiler":
        with torch.profiler.profile() as profile:
            fused(*args)
        return [e.key for e in profile.events()]
    if watcher == "make_fx":
        return [str(n.target) for n in make_fx(fused)(*args).graph.nodes]
    if watcher == "trace":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(fused, tuple(args), check_trace=False)
        return [n.kind() for n in traced.inlined_graph.nodes()]
    mode = {"dispatch mode": Seen, "function mode": Called}[watcher]()
    with mode:
        fused(*args)
    return mode.names


@pytest.mark.parametrize(
    "watcher", ["dispatch mode", "function mode", "profiler", "make_fx", "trace"]
)
@pytest.mark.parametrize("op", OPS)
def test_whoever_watches_sees_the_op(op, watcher):
    """A plain call on the CPU skips the dispatcher only where that cannot be noticed."""
    fused, _ = build(op)
    args = inputs(op, 5, grad=False)
    with torch.no_grad():
        fused(*args)  # also when an unwatched call came first
        names = names_seen(watcher, fused.eval(), args)
    pattern = rf"fused_ops(::|\.){OPERATORS[op].name}_forward(\.default)?"
    assert len([n for n in names if re.fullmatch(pattern, n)]) == 1, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_unwatched_calls_skip_the_dispatcher_and_give_the_same(op, dtype, monkeypatch):
    fused, _ = build(op, dtype=dtype)
    args = inputs(op, 5, dtype=dtype, grad=False)
    operator = OPERATORS[op]

    def never(*args):
        raise AssertionError("went through the dispatcher")

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(operator, "_forward_op", never)
            first, again = fused(*args), fused(*args)
            with pytest.raises(AssertionError, match="dispatcher"):
                fused(args[0].as_subclass(Plain), *args[1:])
        monkeypatch.setattr(type(operator), "_nobody_watches", staticmethod(lambda: False))
        dispatched = fused(*args)
    assert torch.equal(first, dispatched) and torch.equal(again, dispatched)
    assert first.stride() == dispatched.stride() and not first._is_view()


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("op", OPS)
def test_checks_are_remembered_for_what_was_checked_only(op, monkeypatch):
    """A call that passed is not checked again; any other shape, dtype or number is."""
    fused, _ = build(op)
    operator = OPERATORS[op]
    checks = []

    def check(*args, check=operator.check):
        checks.append(args)
        return check(*args)

    monkeypatch.setattr(operator, "check", check)
    monkeypatch.setattr(operator, "_known", {})
    with torch.no_grad():
        for n, count in ((5, 1), (5, 1), (6, 2), (5, 2)):
            fused(*inputs(op, n, grad=False))
            assert len(checks) == count
        flat = operands(op, fused, inputs(op, 5, grad=False))
        for _ in range(2):  # what fails is never remembered
            with pytest.raises(TypeError, match=operator.name):
                operator(flat[0].to(torch.int64), *flat[1:])
        assert len(checks) == 4
        monkeypatch.setattr(_dispatch, "_REMEMBERED", 2)
        for n in range(1, 6):
            fused(*inputs(op, n, grad=False))
        assert len(operator._known) <= 2


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_activation_checkpointing(op, use_reentrant):
    fused, _ = build(op)
    args = inputs(op, 5)
    cotangent = torch.randn_like(fused(*args))
    wanted = [a for a in args if a.requires_grad] + list(fused.parameters())

    def gradients(call):
        for tensor in wanted:
            tensor.grad = None
        call(*args).backward(cotangent)
        return [t.grad for t in wanted]

    plain = gradients(fused)
    checkpoint = torch.utils.checkpoint.checkpoint
    again = gradients(lambda *a: checkpoint(fused, *a, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# Parametrized and replaced submodules ------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


LINEAR = {
    "triangular_multiplicative_update": "proj_a",
    "msa_row_attention": "query",
    "triangle_attention": "query",
    "invariant_point_attention": "q_pts",
}


@pytest.mark.parametrize("how", ["parametrize", "weight_norm"])
@pytest.mark.parametrize("op", MASKED_OPS)
def test_parametrized_weights_are_used(op, how):
    fused, _ = build(op)
    eager = getattr(reference, MODULES[op])(*SIZES[op])
    eager.load_state_dict(fused.state_dict())
    args = inputs(op, 5)
    plain = fused(*args)
    for module in (fused, eager):
        linear = getattr(module, LINEAR[op])
        if how == "parametrize":
            parametrize.register_parametrization(linear, "weight", Doubled())
        else:
            parametrizations.weight_norm(linear)
            with torch.no_grad():
                linear.parametrizations.weight.original0.mul_(1.5)
    cotangent = torch.randn_like(plain)
    ours, grads = evaluate(fused, args, cotangent)
    theirs, their_grads = evaluate(eager, args, cotangent)
    assert not torch.allclose(ours, plain)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for name, gradient in their_grads.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-3, rtol=1e-3, msg=name)


HOOKS = {  # (installs a hook that computes the weight before each forward, what it computes from)
    "weight_norm": (torch.nn.utils.weight_norm, "weight_g"),
    "spectral_norm": (torch.nn.utils.spectral_norm, "weight_orig"),
    "pruning": (lambda m: prune.random_unstructured(m, "weight", 0.5), "weight_orig"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize("op", MASKED_OPS)
def test_weights_that_a_hook_computes_are_right_or_refused(op, how):
    fused, eager = build(op)
    fused, eager = copy.deepcopy(fused).eval(), copy.deepcopy(eager).eval()
    args = inputs(op, 5, grad=False)
    for module in (fused, eager):
        linear = getattr(module, LINEAR[op])
        install, source = HOOKS[how]
        torch.manual_seed(0)
        install(linear)
        with torch.no_grad():  # as an optimizer step does: the weight is stale until the hook runs
            getattr(linear, source).mul_(torch.linspace(1, 3, linear.weight.shape[0])[:, None])
    try:
        with torch.no_grad():
            result = fused(*args)
    except TypeError as error:
        assert LINEAR[op] in str(error) and "hook" in str(error)
    else:
        torch.testing.assert_close(result, eager(*args), atol=1e-4, rtol=1e-4)


def test_parametrized_head_weights_are_used():
    fused, eager = build("invariant_point_attention")
    eager = copy.deepcopy(eager)
    args = inputs("invariant_point_attention", 5)
    plain = fused(*args)
    parametrize.register_parametrization(fused, "head_weights", Doubled())
    with torch.no_grad():
        eager.head_weights.mul_(2)
    result = fused(*args)
    assert not torch.allclose(result, plain)
    torch.testing.assert_close(result, eager(*args), atol=1e-4, rtol=1e-4)


class Scaled(nn.Module):
    """An adapter as people put in the place of a linear, with parameters of the same names."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return 3 * nn.functional.linear(x, self.weight, self.bias)


class Wrapped(nn.Module):
    """Another that keeps the linear inside."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear

    def forward(self, x):
        return 3 * self.base(x)


class Subclass(nn.Linear):
    """And one that is a linear, but computes something else."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.load_state_dict(linear.state_dict())

    def forward(self, x):
        return 3 * super().forward(x)


@pytest.mark.parametrize("adapter", [Scaled, Wrapped, Subclass, nn.Identity])
@pytest.mark.parametrize("op", MASKED_OPS)
def test_submodule_that_is_no_linear_is_refused(op, adapter):
    fused, _ = build(op)
    replacement, args = adapter(getattr(fused, LINEAR[op])), inputs(op, 5)

    def use():  # refused at once, or when called
        setattr(fused, LINEAR[op], replacement)
        fused(*args)

    with pytest.raises(TypeError, match=rf"{LINEAR[op]} must be an nn.Linear.*{adapter.__name__}"):
        use()


@pytest.mark.parametrize("adapter", [Scaled, Subclass])
@pytest.mark.parametrize("op", MASKED_OPS)
def test_from_reference_refuses_an_adapter_with_the_same_parameters(op, adapter):
    eager = getattr(reference, MODULES[op])(*SIZES[op])
    setattr(eager, LINEAR[op], adapter(getattr(eager, LINEAR[op])))
    with pytest.raises(
        TypeError, match=rf"{LINEAR[op]} must be a plain nn.Linear.*{adapter.__name__}"
    ):
        getattr(fused_ops, MODULES[op]).from_reference(eager)


# Results and arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize("op", OPS)
def test_result_may_be_changed_in_place(device, op, n, dtype):
    """The usual ``out += residual``; a view returned by a Function would forbid it."""
    fused, _ = build(op, dtype=dtype, device=device)
    args = inputs(op, n, (1,), dtype=dtype, device=device)
    expected = torch.autograd.grad((fused(*args) * 2).sum(), args[0])[0]
    result = fused(*args)
    assert not result._is_view()
    result *= 2
    assert torch.equal(torch.autograd.grad(result.sum(), args[0])[0], expected)


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused_not_zero(op):
    fused, _ = build(op)
    fused.requires_grad_(False)
    first, *others = inputs(op, 5, (1,), grad=False)
    text = f"{OPERATORS[op].name}: forward-mode"
    with pytest.raises(RuntimeError, match=text):
        torch.func.jvp(lambda x: fused(x, *others), (first,), (torch.ones_like(first),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(RuntimeError, match=text):
            fused(dual, *others)


@pytest.mark.parametrize("wrong", [None, [1.0], 2.0, "pair"], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_what_is_no_tensor_is_named(op, wrong):
    fused, _ = build(op)
    args = inputs(op, 5, (1,), grad=False)
    first, second = [*inspect.signature(fused.forward).parameters][:2]
    with pytest.raises(TypeError, match=f"{op}: {first} must be a torch.Tensor, got"):
        fused(wrong, *args[1:])
    if wrong is not None:
        with pytest.raises(TypeError, match=f"{op}: {second} must be a torch.Tensor.*got"):
            fused(args[0], wrong, *args[2:])


def test_no_heads_are_refused():
    for heads in (0, -4):
        with pytest.raises(ValueError, match="num_heads"):
            fused_ops.MSARowAttention(8, 4, heads)
        with pytest.raises(ValueError, match="num_heads"):
            fused_ops.TriangleAttention(8, heads)
        with pytest.raises(ValueError, match="num_heads"):
            fused_ops.InvariantPointAttention(8, 4, heads, 2, 2)


def test_two_different_eps_are_refused():
    eager = reference.TriangularMultiplicativeUpdate(8, 4)
    eager.layer_norm_out.eps = 1e-3
    fused = fused_ops.TriangularMultiplicativeUpdate.from_reference(eager)
    with pytest.raises(ValueError, match=r"eps of layer_norm_in, expected 1e-05, got 0\.001"):
        fused(torch.randn(1, 3, 3, 8))


# Errors ------------------------------------------------------------------------------------------

MASKS = {
    "triangular_multiplicative_update": "pair_mask",
    "msa_row_attention": "msa_mask",
    "triangle_attention": "pair_mask",
    "invariant_point_attention": "node_mask",
}


@pytest.mark.parametrize("op", MASKED_OPS)
def test_mask_that_requires_grad_is_refused(op):
    fused, _ = build(op)
    *tensors, mask = inputs(op, 5)
    mask.requires_grad_()
    text = rf"{op}: {MASKS[op]} must not require a gradient .* got requires_grad=True"
    with pytest.raises(ValueError, match=text):
        fused(*tensors, mask)
    with torch.no_grad():  # then nobody asks for it
        assert torch.equal(fused(*tensors, mask), fused(*tensors, mask.detach()))


@pytest.mark.parametrize("op", OPS)
def test_precision_is_validated(op):
    cls = getattr(fused_ops, MODULES[op])
    for precision in ("fp8", "TF32", 32):
        with pytest.raises(
            ValueError, match=rf"{op}: precision must be None, 'ieee' or 'tf32', got"
        ):
            cls(*SIZES[op], precision=precision)
    for precision in (None, "ieee", "tf32"):
        assert cls(*SIZES[op], precision=precision).precision == precision
    fused = cls(*SIZES[op])
    fused.precision = "fp8"
    with pytest.raises(ValueError, match="'fp8'"):
        fused(*inputs(op, 5))


RANKS = {  # of the arguments whose own rank is checked; the shapes of the others follow from them
    "tensor_matmul": {"b": 2},
    "triangular_multiplicative_update": {"pair": 3, "mask": 2, "proj_a_weight": 2},
    "msa_row_attention": {"msa": 3, "pair": 3, "mask": 2, "query_weight": 2},
    "invariant_point_attention": {
        "node": 2,
        "pair": 3,
        "translations": 2,
        "rotations": 3,
        "node_mask": 1,
        "q_proj_weight": 2,
    },
}
DECIDE = {  # the size of their last axis is right by definition: what has to match it is blamed
    "tensor_matmul": {"a": "b"},
    "triangular_multiplicative_update": {
        "pair": "layer_norm_in_weight",
        "proj_a_weight": "proj_a_weight",
    },
    "msa_row_attention": {"msa": "layer_norm_weight", "pair": "pair_bias_weight"},
    "invariant_point_attention": {"node": "layer_norm_weight", "pair": "pair_bias_weight"},
}


NOT_PASSED = {
    "msa_row_attention": ("dropout_seed", "pair_norm_weight", "pair_norm_bias"),
    "invariant_point_attention": (
        "pair_value",
        "q_proj_bias",
        "k_proj_bias",
        "v_proj_bias",
        "q_pts_bias",
        "k_pts_bias",
        "v_pts_bias",
        "pair_bias_bias",
    ),
}
TENSOR_ARGUMENTS = [  # (op, name) of every tensor that a plain call passes
    (op, OPERATORS[op]._names[i])
    for op in DISPATCHED_OPS
    for i in OPERATORS[op]._tensors
    if OPERATORS[op]._names[i] not in NOT_PASSED.get(op, ())
]


def assert_raises(op, name, change, kind, text):
    fused, _ = build(op)
    flat = operands(op, fused, inputs(op, 5, grad=False))
    position = OPERATORS[op]._names.index(name)
    flat[position] = change(flat[position])
    text = text.format(got=re.escape(str(tuple(flat[position].shape))), dtype=flat[position].dtype)
    with torch.no_grad(), pytest.raises(kind, match=text):
        OPERATORS[op](*flat)


@pytest.mark.parametrize(("op", "name"), TENSOR_ARGUMENTS)
def test_wrong_size_is_named(op, name):
    if (op, name) == ("tensor_matmul", "b"):  # any number of columns is right

        def grow(value):
            return torch.cat([value, value[:1]])

    else:

        def grow(value):
            return torch.cat([value, value[..., :1]], -1)

    blamed = DECIDE[op].get(name, name)
    got = "{got}" if blamed == name else r"\("
    assert_raises(op, name, grow, ValueError, rf"{op}: {blamed} must have shape \(.*got {got}")


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in RANKS for name in RANKS[op]])
def test_wrong_rank_is_named(op, name):
    axes = RANKS[op][name] - 1
    text = rf"{op}: {name} must have shape \(.*got {{got}}"
    assert_raises(op, name, lambda t: t.reshape(-1)[0].expand([2] * axes), ValueError, text)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize(("op", "name"), TENSOR_ARGUMENTS)
def test_wrong_dtype_is_named(op, name, dtype):
    if "mask" in name:
        text = rf"{op}: {name} must be bool, integer or floating, got torch.complex64"
        assert_raises(op, name, lambda t: t.to(torch.complex64), TypeError, text)
        return
    text = rf"{op}: {name} must be .*float.*, got {{dtype}}"
    assert_raises(op, name, lambda t: t.to(dtype), TypeError, text)


@pytest.mark.parametrize(("op", "name"), TENSOR_ARGUMENTS)
def test_wrong_device_is_named(op, name):
    first = OPERATORS[op]._names[0]
    # Where the first is elsewhere, the second is the one that does not fit.
    text = rf"{op}: {name} must be on the device of {first}, expected cpu, got meta"
    if name == first:
        text = rf"{op}: \w+ must be on the device of {first}, expected meta, got cpu"
    assert_raises(op, name, lambda t: t.to("meta"), RuntimeError, text)


@pytest.mark.parametrize(
    ("op", "name", "value", "text"),
    [
        (
            "msa_row_attention",
            "num_heads",
            3,
            "query_weight must have a multiple of num_heads = 3.*8",
        ),
        ("msa_row_attention", "num_heads", 0, "num_heads = 0"),
        ("msa_row_attention", "dropout", 1.5, r"dropout must be in \[0, 1\], got 1.5"),
        (
            "msa_row_attention",
            "dropout_seed",
            torch.ones(2),
            r"dropout_seed must be one int64.*\(2,\)",
        ),
        ("msa_row_attention", "pair_norm_weight", torch.ones(6), "given together, got only one"),
        ("invariant_point_attention", "num_heads", 5, "a multiple of num_heads = 5 rows, got 12"),
        ("invariant_point_attention", "num_query_points", 0, "num_query_points must be at least 1"),
        ("invariant_point_attention", "num_value_points", 4, r"v_pts_weight must have shape .*got"),
    ],
)
def test_wrong_numbers_are_named(op, name, value, text):
    fused, _ = build(op)
    flat = operands(op, fused, inputs(op, 5, grad=False))
    flat[OPERATORS[op]._names.index(name)] = value
    with torch.no_grad(), pytest.raises(ValueError, match=f"{op}: .*{text}"):
        OPERATORS[op](*flat)


@pytest.mark.parametrize("op", DISPATCHED_OPS)
def test_backward_op_checks_its_arguments(op):
    fused, _ = build(op)
    flat = operands(op, fused, inputs(op, 5, grad=False))
    backward = getattr(torch.ops.fused_ops, f"{op}_backward")
    needs = [flat[i] is not None for i in OPERATORS[op].differentiable]
    with torch.no_grad():
        result = OPERATORS[op](*flat)
        with pytest.raises(ValueError, match=rf"{op}: grad must have shape .*got \(2, 3\)"):
            backward(torch.ones(2, 3), *flat, needs)
        with pytest.raises(ValueError, match=rf"{op}: needs must have {len(needs)} entries, got 1"):
            backward(torch.ones_like(result), *flat, [True])


# Without the dispatcher ---------------------------------------------------------------------------


def test_compiled_autograd_sees_the_backward():
    x, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        fused_ops.tensor_matmul(x, b).sum().backward()
    torch.testing.assert_close(x.grad, b.sum(dim=1).expand(3, 4))


def test_batched_gradients_are_refused_by_name():
    x, b = torch.randn(6, 3, 4, requires_grad=True), torch.randn(4, 5)
    y = fused_ops.tensor_matmul(x, b)
    with pytest.raises(RuntimeError, match="tensor_matmul_backward"):
        torch.autograd.grad(y, x, torch.randn(7, *y.shape), is_grads_batched=True)


@pytest.mark.parametrize("wrong", [None, 1.0])
def test_a_required_tensor_that_is_none_or_no_tensor_is_named(wrong):
    z = torch.randn(4, 4, 8)
    fused = fused_ops.TriangularMultiplicativeUpdate(8, 8)
    weights = dict(fused.named_parameters())
    names = [name.replace(".", "_") for name in weights]
    arguments = dict(zip(names, weights.values(), strict=True))
    arguments["gate_a_weight"] = wrong
    with pytest.raises((TypeError, RuntimeError), match="gate_a_weight"), torch.no_grad():
        fused_ops.functional.triangular_multiplicative_update(z, None, **arguments)
