"""CollaborativeAttention: the layer on its own, for training from the first step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collab import ops
from collab.config import MIXING_STARTS, is_integer
from collab.fused_projection import project_together


class CollaborativeAttention(nn.Module):
    """Attention whose heads share one query/key space and weight it by their own mixing row.

    scores[head] = ((x Wq * mixing[head]) (y Wk)ᵀ + (y content[head])ᵀ) * scale
    output       = concat over heads of softmax(scores[head] + mask) (y Wv[head]), times Wo

    (Cordonnier, Loukas, Jaggi: "Multi-Head Attention: Collaborate Instead of Concatenate". There `shared_dim` is
    D̃k, `mixing` is M and `content` is v.) Ordinary heads are the case `shared_dim = num_heads * head_dim` with blocks
    of ones in `mixing`, which is how the layer starts unless told otherwise. With `dims_per_head` a head uses so many
    of the shared dimensions, those in its row of `dims`, and its scores cost what an ordinary head's of that size do.

    Example:
        >>> layer = CollaborativeAttention(embed_dim=64, num_heads=4, shared_dim=24)
        >>> layer(torch.randn(2, 10, 64), causal=True).shape
        torch.Size([2, 10, 64])

    Args:
        embed_dim: width of the query input and of the output.
        num_heads: number of heads.
        shared_dim: dimensions of the shared query/key space; `num_heads * head_dim` if not given.
        dims_per_head: how many of the shared dimensions each head uses; all of them if not given.
        head_dim: size of one value head, and of the head `scale` is derived from; `embed_dim / num_heads` if not given.
        key_width: width of the key input; `embed_dim` if not given.
        value_width: width of the value input; `key_width` if not given.
        bias: give the value and output projections a bias, and the scores a content term.
        dropout: probability of dropping an attention weight while training.
        scale: factor on the scores; 1 / sqrt(head_dim) if not given, whatever `shared_dim` is.
        mixing: how the mixing starts: "concatenate" (blocks of ones), "normal", "uniform" (both with mean zero and
            variance head_dim / shared_dim, so that scores vary as those of ordinary heads do; head_dim / dims_per_head
            when given) or "ones".
        implementation: "auto" or the name of one of `collab.ops.IMPLEMENTATIONS`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        shared_dim: int | None = None,
        *,
        dims_per_head: int | None = None,
        head_dim: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        mixing: str = "concatenate",
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, shared_dim=shared_dim, head_dim=head_dim)
        _check_sizes(key_width=key_width, value_width=value_width)
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}; or give head_dim"
                )
            head_dim = embed_dim // num_heads
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        ops.check_implementation(implementation)
        shared_dim = num_heads * head_dim if shared_dim is None else shared_dim
        if dims_per_head is not None and (not is_integer(dims_per_head) or not 1 <= dims_per_head <= shared_dim):
            raise ValueError(
                f"dims_per_head must be an integer from 1 to shared_dim {shared_dim}, got {dims_per_head!r}"
            )
        self.embed_dim, self.num_heads, self.shared_dim, self.head_dim = embed_dim, num_heads, shared_dim, head_dim
        self.dropout, self.mixing_start, self.implementation = dropout, mixing, implementation
        self.scale = head_dim**-0.5 if scale is None else scale
        key_width = embed_dim if key_width is None else key_width
        value_width = key_width if value_width is None else value_width
        content_dim = num_heads if bias else 0
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = nn.Linear(embed_dim, shared_dim, bias=False, **options)
        # One projection gives the shared key and, in its last rows, the content score of every head.
        self.key = nn.Linear(key_width, shared_dim + content_dim, bias=False, **options)
        self.value = nn.Linear(value_width, num_heads * head_dim, bias=bias, **options)
        self.out = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, **options)
        self.mixing = nn.Parameter(torch.empty(num_heads, dims_per_head or shared_dim, **options))
        self.mixing_dims: Tensor | None
        empty_dims = (
            None if dims_per_head is None else torch.empty(self.mixing.shape, device=device, dtype=ops.DIMS_DTYPE)
        )
        self.register_buffer("mixing_dims", empty_dims)
        self.reset_parameters()

    @property
    def content(self) -> Tensor | None:
        """(head, key_width): the vector whose product with a key input is added to a head's scores, if there is one."""
        return self.key.weight[self.shared_dim :] if self.key.out_features > self.shared_dim else None

    @property
    def dims(self) -> Tensor | None:
        """(head, dims_per_head): the shared dimension each mixing weight is for; None when every head uses all."""
        return self.mixing_dims

    @torch.no_grad()
    def set_dims_(self, dims: Tensor) -> None:
        """Let the mixing weights (head, dims_per_head), as they are, be for these shared dimensions.

        Args:
            dims: (head, dims_per_head) integers from 0 to `shared_dim` - 1, no two in a head alike.
        """
        if self.mixing_dims is None:
            raise ValueError(
                "dims must be None for a layer whose heads use all dimensions: build it with dims_per_head"
            )
        ops.check_dims(dims, self.num_heads, self.shared_dim)
        if dims.shape != self.mixing.shape:
            raise ValueError(f"dims must be {tuple(self.mixing.shape)}, as mixing is, got {tuple(dims.shape)}")
        self.mixing_dims.copy_(dims)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights: Xavier for the projections, zeros for biases and content, `mixing_start` for mixing.

        Each head uses its own block of dimensions first, then others; see `start_dims`.
        """
        for projection in (self.query, self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
        nn.init.xavier_uniform_(self.key.weight[: self.shared_dim])
        self.key.weight[self.shared_dim :].zero_()
        for projection in (self.value, self.out):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.mixing_dims is not None:
            self.mixing_dims.copy_(start_dims(self.num_heads, self.shared_dim, self.mixing.shape[1]))
        start_mixing_(self.mixing, self.head_dim, self.mixing_start, dims=self.mixing_dims, shared_dim=self.shared_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        causal: bool = False,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key`, which is `query` itself unless given.

        Args:
            query: (..., query, embed_dim), with any number of batch dimensions.
            key: (..., key, key_width).
            value: (..., key, value_width); `key` if not given.
            mask: (query, key), (..., query, key) or (..., head, query, key), where any size may be one; boolean, True
                where a query may attend, or floating point, added to the scores.
            padding_mask: (..., key), True where `key` holds a token and False where it is padding.
            causal: query i sees keys 0 to i only.
            need_weights: also return the attention weights.

        Returns:
            output (..., query, embed_dim), and with `need_weights` the weights (..., head, query, key), those dropped
            while training set to zero.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        batch = query.shape[:-2]
        mask = None if mask is None else _flatten_mask(mask, batch)
        padding_mask = None if padding_mask is None else _flatten_padding_mask(padding_mask, key.shape[:-1])
        is_self = query is key and key is value
        query = _flatten_batch(query, 2)
        key, value = (query, query) if is_self else (_flatten_batch(key, 2), _flatten_batch(value, 2))
        if mask is not None and padding_mask is not None:
            ops.check_mask(mask, (query.shape[0], self.num_heads, query.shape[1], key.shape[1]))
            is_allowed = mask.dtype == torch.bool
            mask = mask & padding_mask if is_allowed else mask.masked_fill(~padding_mask, -torch.inf)
        shared_query, shared_key, projected_value = self._project(query, key, value)
        context, weights = ops.attention(
            shared_query,
            shared_key,
            projected_value.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2),
            self.mixing,
            scale=self.scale,
            dims=self.mixing_dims,
            mask=padding_mask if mask is None else mask,
            causal=causal,
            dropout=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            implementation=self.implementation,
        )
        output: Tensor = self.out(context.transpose(1, 2).flatten(-2))
        output = output.reshape(*batch, *output.shape[-2:])
        if weights is None:
            return output
        return output, weights.reshape(*batch, *weights.shape[-3:])

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Shared query, shared key with content scores, and value."""
        if query is key and key is value:
            together = project_together((self.query, self.key, self.value), query)
            if together is not None:
                return together
        return self.query(query), self.key(key), self.value(value)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        projections = {"query": self.query, "key": self.key, "value": self.value}
        for (name, projection), given in zip(projections.items(), (query, key, value), strict=True):
            width = projection.in_features
            if given.dim() < 2 or given.shape[-1] != width:
                raise ValueError(f"{name} must be (..., tokens, {width}), got {tuple(given.shape)}")
        if key.shape[:-2] != query.shape[:-2] or value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                "query, key and value must have the same batch dimensions, and key and value the same tokens, "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )

    def extra_repr(self) -> str:
        """Sizes, for printing a model."""
        sizes = f"num_heads={self.num_heads}, head_dim={self.head_dim}, shared_dim={self.shared_dim}"
        return sizes if self.mixing_dims is None else f"{sizes}, dims_per_head={self.mixing.shape[1]}"


def head_blocks(num_heads: int, shared_dim: int, **options: torch.device | torch.dtype | None) -> Tensor:
    """(head, shared): ones on each head's own block of dimensions, zeros elsewhere.

    Blocks differ by at most one dimension where the heads do not divide the size, and heads share dimensions where
    there are more heads than dimensions, so that no head is left without any.
    """
    blocks = torch.zeros(num_heads, shared_dim, **options)  # type: ignore[arg-type]
    for head in range(num_heads):
        start = head * shared_dim // num_heads
        blocks[head, start : max(start + 1, (head + 1) * shared_dim // num_heads)] = 1
    return blocks


def start_dims(num_heads: int, shared_dim: int, dims_per_head: int) -> Tensor:
    """(head, dims_per_head): which shared dimensions each head uses, to train from scratch.

    A head's own block comes first, as in `head_blocks`; what it may use beyond is spread evenly over the others, in the
    order they follow its block, so that every dimension has about as many heads as any other.
    """
    rows = []
    for own in head_blocks(num_heads, shared_dim).bool():
        block = own.nonzero().flatten()
        others = (int(block[-1]) + 1 + torch.arange(shared_dim - len(block))) % shared_dim
        more = max(0, dims_per_head - len(block))
        spread = others[torch.arange(more) * len(others) // max(1, more)]
        rows.append(torch.cat((block[:dims_per_head], spread)).sort().values)
    return torch.stack(rows)


@torch.no_grad()
def start_mixing_(
    mixing: Tensor,
    head_dim: int,
    start: str,
    generator: torch.Generator | None = None,
    *,
    dims: Tensor | None = None,
    shared_dim: int | None = None,
) -> None:
    """Fill `mixing` (head, shared), or (head, k) with `dims` and `shared_dim`; see `CollaborativeAttention`."""
    # Independent entries of this deviation give scores the variance of one head's block of ones.
    deviation = math.sqrt(head_dim / mixing.shape[1])
    if start == "concatenate":
        blocks = head_blocks(len(mixing), shared_dim or mixing.shape[1], device=mixing.device)
        mixing.copy_(blocks if dims is None else blocks.gather(1, dims.long()))
    elif start == "normal":
        mixing.normal_(0.0, deviation, generator=generator)
    elif start == "uniform":
        limit = deviation * math.sqrt(3)
        mixing.uniform_(-limit, limit, generator=generator)
    elif start == "ones":
        mixing.fill_(1.0)
    else:
        raise ValueError(f"mixing must be one of {list(MIXING_STARTS)}, got {start!r}")


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (not is_integer(size) or size < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def _flatten_batch(tensor: Tensor, kept: int) -> Tensor:
    """One batch dimension instead of any number of them, before the last `kept` dimensions."""
    batch = tensor.shape[: tensor.dim() - kept]
    # Counted, not left to reshape to infer, which it cannot do of empty tensors.
    return tensor if len(batch) == 1 else tensor.reshape(math.prod(batch), *tensor.shape[-kept:])


def _flatten_padding_mask(padding_mask: Tensor, keys: torch.Size) -> Tensor:
    """(..., key) as (batch, 1, 1, key); `keys` is the shape it must have."""
    if padding_mask.dtype != torch.bool:
        raise ValueError(f"padding_mask must be boolean, True where there is a token, got {padding_mask.dtype}")
    if padding_mask.shape != keys:
        raise ValueError(f"padding_mask must be {tuple(keys)}, as the key is, got {tuple(padding_mask.shape)}")
    return _flatten_batch(padding_mask, 1)[:, None, None]


def _flatten_mask(mask: Tensor, batch: torch.Size) -> Tensor:
    """(query, key) as it is, (..., query, key) and (..., head, query, key) as (batch, head, query, key)."""
    if mask.dim() == 2:
        return mask
    if mask.dim() not in (len(batch) + 2, len(batch) + 3):
        raise ValueError(
            f"mask must be (query, key), (..., query, key) or (..., head, query, key) with the {len(batch)} batch "
            f"dimensions of the query, got {tuple(mask.shape)}"
        )
    mask = mask if mask.dim() == len(batch) + 3 else mask.unsqueeze(-3)
    if len(batch) == 1:
        return mask
    if any(size not in (1, whole) for size, whole in zip(mask.shape, batch, strict=False)):
        raise ValueError(f"mask must have batch dimensions broadcastable to {tuple(batch)}, got {tuple(mask.shape)}")
    return _flatten_batch(mask.expand(*batch, *mask.shape[-3:]), 3)
