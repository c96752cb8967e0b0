# SPDX-License-Identifier: Apache-2.0
"""MSA row attention with pair bias."""

from fused_ops.msa_row_attention.module import MSARowAttention
from fused_ops.msa_row_attention.op import msa_row_attention

__all__ = ["MSARowAttention", "msa_row_attention"]
