# SPDX-License-Identifier: Apache-2.0
"""The op: schema, checks, registration and the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops import _check
from fused_ops._dispatch import Operator, Result
from fused_ops._precision import autocast_dtype, resolve_precision
from fused_ops.msa_row_attention import composition, cuda

NAME = "msa_row_attention"

_ARGUMENTS = (
    "Tensor msa",
    "Tensor pair",
    "Tensor? mask",
    "Tensor? dropout_seed",
    "Tensor layer_norm_weight",
    "Tensor layer_norm_bias",
    "Tensor query_weight",
    "Tensor key_weight",
    "Tensor value_weight",
    "Tensor gate_weight",
    "Tensor? gate_bias",
    "Tensor? pair_norm_weight",
    "Tensor? pair_norm_bias",
    "Tensor pair_bias_weight",
    "Tensor out_proj_weight",
    "Tensor? out_proj_bias",
    "int num_heads",
    "float dropout",
    "float eps",
    "str precision",
    "ScalarType? dtype",
)

DIFFERENTIABLE = (
    "msa",
    "pair",
    "layer_norm_weight",
    "layer_norm_bias",
    "query_weight",
    "key_weight",
    "value_weight",
    "gate_weight",
    "gate_bias",
    "pair_norm_weight",
    "pair_norm_bias",
    "pair_bias_weight",
    "out_proj_weight",
    "out_proj_bias",
)


def _check_arguments(
    msa: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    dropout_seed: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    pair_norm_weight: Tensor | None,
    pair_norm_bias: Tensor | None,
    pair_bias_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    dropout: float,
    eps: float,
    precision: str,
    dtype: torch.dtype | None,
) -> Result:
    _check.rank_at_least(NAME, "msa", msa, 3, "(..., S, N, msa_dim)")
    _check.rank_at_least(NAME, "pair", pair, 3, "(..., N, N, pair_dim)")
    rows, n, channels = msa.shape[-3:]
    lead = tuple(msa.shape[:-3])
    pair_channels = pair.shape[-1]
    pair_lead = _check.trailing(
        NAME, "pair", pair, (n, n, pair_channels), "(..., N, N, pair_dim) with the N of msa"
    )
    _check.broadcasts(NAME, "pair", pair_lead, lead, "msa")
    if mask is not None:
        _check.mask_dtype(NAME, "mask", mask)
        mask_lead = _check.trailing(NAME, "mask", mask, (rows, n), "(..., S, N)")
        _check.broadcasts(NAME, "mask", mask_lead, lead, "msa")
    if dropout_seed is not None and (
        dropout_seed.dtype != torch.int64 or dropout_seed.numel() != 1
    ):
        raise ValueError(
            f"{NAME}: dropout_seed must be one int64, got {dropout_seed.dtype} of shape "
            f"{tuple(dropout_seed.shape)}"
        )
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{NAME}: dropout must be in [0, 1], got {dropout}")
    _check.rank_at_least(NAME, "query_weight", query_weight, 2, "(num_heads * d, msa_dim)")
    width = query_weight.shape[0]
    if num_heads < 1 or width % num_heads:
        raise ValueError(
            f"{NAME}: query_weight must have a multiple of num_heads = {num_heads} rows, "
            f"got {width}"
        )
    parameters: dict[str, Tensor | None] = {}

    def expect(name: str, tensor: Tensor | None, shape: tuple[int, ...], text: str) -> None:
        parameters[name] = tensor
        if tensor is not None:
            _check.shape(NAME, name, tensor, shape, text)

    expect("layer_norm_weight", layer_norm_weight, (channels,), "(msa_dim,)")
    expect("layer_norm_bias", layer_norm_bias, (channels,), "(msa_dim,)")
    expect("query_weight", query_weight, (width, channels), "(num_heads * d, msa_dim)")
    expect("key_weight", key_weight, (width, channels), "(num_heads * d, msa_dim)")
    expect("value_weight", value_weight, (width, channels), "(num_heads * d, msa_dim)")
    expect("gate_weight", gate_weight, (width, channels), "(num_heads * d, msa_dim)")
    expect("gate_bias", gate_bias, (width,), "(num_heads * d,)")
    if (pair_norm_weight is None) != (pair_norm_bias is None):
        raise ValueError(
            f"{NAME}: pair_norm_weight and pair_norm_bias must be given together, got only one"
        )
    expect("pair_norm_weight", pair_norm_weight, (pair_channels,), "(pair_dim,)")
    expect("pair_norm_bias", pair_norm_bias, (pair_channels,), "(pair_dim,)")
    expect(
        "pair_bias_weight", pair_bias_weight, (num_heads, pair_channels), "(num_heads, pair_dim)"
    )
    expect("out_proj_weight", out_proj_weight, (channels, width), "(msa_dim, num_heads * d)")
    expect("out_proj_bias", out_proj_bias, (channels,), "(msa_dim,)")
    _check.same_device(
        NAME,
        "msa",
        msa,
        {"pair": pair, "mask": mask, "dropout_seed": dropout_seed, **parameters},
    )
    result = _check.result_dtype(NAME, {"msa": msa, "pair": pair}, parameters, dtype)
    return Result(tuple(msa.shape), result, msa.device)


OPERATOR = Operator(
    NAME,
    _ARGUMENTS,
    differentiable=DIFFERENTIABLE,
    check=_check_arguments,
    shapes=lambda a: {
        "msa": list(a["msa"].shape),
        "pair": list(a["pair"].shape),
        "num_heads": [a["num_heads"]],
        "head_dim": [a["query_weight"].shape[0] // a["num_heads"]],
        "dropout": [int(a["dropout"] > 0.0)],
    },
    forward=composition.forward,
    backward=composition.backward,
    device_backward=cuda.cuda_backward,
    plans_cuda=False,
    saves=True,
)


def draw_dropout_seed(like: Tensor) -> Tensor:
    """One int64 from PyTorch's generator of the device.

    Obeys ``manual_seed``, checkpointing and CUDA-graph replay, and costs no synchronisation.
    """
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=like.device)


def msa_row_attention(
    msa: Tensor,
    pair: Tensor,
    mask: Tensor | None,
    layer_norm_weight: Tensor,
    layer_norm_bias: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    pair_bias_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    num_heads: int,
    *,
    pair_norm_weight: Tensor | None = None,
    pair_norm_bias: Tensor | None = None,
    dropout: float = 0.0,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Gated attention along the rows of an MSA, biased by the pair representation.

    AlphaFold 2 supplement, Algorithm 7. With ``x = LayerNorm(msa)`` and heads of width d ::

        logits[..., s, h, i, j] = q . k / sqrt(d) + pair_bias(pair)[..., i, j, h]
        out = out_proj(sigmoid(gate(x)) * sum_j softmax_j(logits) v)

    Parameters
    ----------
    msa
        (..., S, N, msa_dim); float32, bfloat16, float16 or float64. Any number of leading axes.
    pair
        (..., N, N, pair_dim); leading axes may be 1 or missing.
    mask
        (..., S, N), bool, integer or floating: keys where it is 0 are not there; None keeps all.
        Not differentiated. A query whose keys are all masked gets attention output zero.
    layer_norm_weight, layer_norm_bias
        (msa_dim,)
    query_weight, key_weight, value_weight, gate_weight
        (num_heads * d, msa_dim); the gate has an optional bias (num_heads * d,).
    pair_bias_weight
        (num_heads, pair_dim)
    out_proj_weight, out_proj_bias
        (msa_dim, num_heads * d) and an optional (msa_dim,).
    num_heads
        Number of heads; d need not be msa_dim / num_heads.
    pair_norm_weight, pair_norm_bias
        (pair_dim,): LayerNorm of the pair before the bias projection, as AlphaFold has it; None
        for none.
    dropout
        Probability of dropping an attention weight; draws from PyTorch's generator.
    eps
        Added to the variance in LayerNorm.
    precision
        For float32 on CUDA: "ieee", "tf32", or None to follow
        ``torch.backends.cuda.matmul.fp32_precision``.

    Returns
    -------
    Tensor
        (..., S, N, msa_dim) in the dtype of ``msa``, or of autocast where that is on.

    Raises
    ------
    ValueError
        For a wrong shape, number of heads or precision, or a mask that requires a gradient.
    TypeError
        For dtypes that do not mix.
    RuntimeError
        For tensors on different devices.
    """
    _check.tensor(NAME, "msa", msa)
    _check.tensor(NAME, "pair", pair)
    _check.mask_needs_no_grad(NAME, "mask", mask)
    return OPERATOR(
        msa,
        pair,
        mask,
        draw_dropout_seed(msa) if dropout > 0.0 else None,
        layer_norm_weight,
        layer_norm_bias,
        query_weight,
        key_weight,
        value_weight,
        gate_weight,
        gate_bias,
        pair_norm_weight,
        pair_norm_bias,
        pair_bias_weight,
        out_proj_weight,
        out_proj_bias,
        num_heads,
        dropout,
        eps,
        resolve_precision(NAME, precision),
        autocast_dtype(msa),
    )
