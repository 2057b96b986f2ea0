"""The causal depthwise convolution in front of the delta rule, from a given tail to the next one.

Legend: b sequences, t tokens, c channels, w kernel width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_convolution(
    x_btc: Tensor, weight_c1w: Tensor, tail_bcw: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """SiLU of the convolution of each channel with its own kernel over the newest w tokens.

    Args:
        tail_bcw: [b, c, w - 1], the inputs of the last w - 1 tokens before these (zeros before a document).
        lengths: real tokens of each sequence; what stands behind them is padding.

    Returns: [b, t, c], and the tail behind each sequence's last real token.
    """
    x_bct = torch.cat([tail_bcw, x_btc.transpose(1, 2)], dim=2)
    y_bct = F.silu(F.conv1d(x_bct, weight_c1w, groups=weight_c1w.shape[0]))
    keep, tokens = tail_bcw.shape[2], x_btc.shape[1]
    if all(length == tokens for length in lengths):
        tail = x_bct[:, :, tokens:].clone()  # not a view: the inputs need not stay
    else:
        index_bw = torch.tensor([[length + i for i in range(keep)] for length in lengths])
        index_bw = index_bw.to(x_btc.device, non_blocking=True)
        tail = x_bct.gather(2, index_bw[:, None, :].expand(-1, x_bct.shape[1], -1))
    return y_bct.transpose(1, 2), tail
