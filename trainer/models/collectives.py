"""Exchanges between ranks that gradients pass through.

Each says what it takes to be equal on the ranks of the group, and what gradients each rank gets. Tensors are cut by
their first dimension, in as many equal shares as there are ranks, filled up with zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F


def own_share(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...], equal on all ranks -> [ceil(N / ranks), ...], this rank's. Every rank gets the gradients of all."""
    result: Tensor = _OwnShare.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def all_shares(values: Tensor, group: dist.ProcessGroup, count: int) -> Tensor:
    """[ceil(N / ranks), ...] -> [N, ...], equal on all ranks, which use it for the same. Undoes `own_share`."""
    result: Tensor = _AllShares.apply(values, group)  # type: ignore[no-untyped-call]
    return result[:count]


def gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] -> [n * ranks, ...], which each rank uses for something else: its gradients are summed."""
    result: Tensor = _Gathering.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def collected(values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """[t] at the indices `own` [t] -> [count], equal on all ranks, which use it for the same."""
    result: Tensor = _Collection.apply(values, own, count, group)  # type: ignore[no-untyped-call]
    return result


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, which use it for the same."""
    result: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def exchanged(values: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """[sum(sent), ...] -> [sum(received), ...]: so many rows to each rank, and from each."""
    result: Tensor = _RowExchange.apply(values, group, sent, received)  # type: ignore[no-untyped-call]
    return result


def used_in_parts(values: Tensor, group: dist.ProcessGroup, first: int) -> Tensor:
    """[..., W], equal on all ranks, each of which uses columns from `first` on for a part: gradients are summed there.

    Those of the columns before are complete on every rank.
    """
    result: Tensor = _UsedInParts.apply(values, group, first)  # type: ignore[no-untyped-call]
    return result


def _cut(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    share = -(-len(values) // size)
    filled = F.pad(values, [0, 0] * (values.ndim - 1) + [0, share * size - len(values)])
    first = dist.get_rank(group) * share
    return filled[first : first + share].contiguous()


def _joined(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = values.new_empty(len(values) * group.size(), *values.shape[1:])
    dist.all_gather_into_tensor(result, values.contiguous(), group=group)
    return result


class _ExchangeContext(FunctionCtx):
    """What a backward pass needs of the forward pass."""

    group: dist.ProcessGroup
    count: int  # rows that there were
    own: Tensor  # of them, this rank's
    first: int  # column
    sent: list[int]
    received: list[int]


class _OwnShare(torch.autograd.Function):
    @staticmethod
    def forward(context: _ExchangeContext, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group, context.count = group, len(values)
        return _cut(values, group)

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None]:
        return _joined(above, context.group)[: context.count], None


class _AllShares(torch.autograd.Function):
    @staticmethod
    def forward(context: _ExchangeContext, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return _joined(values, group)

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None]:
        return _cut(above, context.group), None


class _Gathering(_AllShares):
    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None]:
        result = above.new_empty(len(above) // context.group.size(), *above.shape[1:])
        dist.reduce_scatter_tensor(result, above.contiguous(), group=context.group)
        return result, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: _ExchangeContext, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        result = values.clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None]:
        return above, None


class _Collection(torch.autograd.Function):
    @staticmethod
    def forward(context: _ExchangeContext, values: Tensor, own: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        context.own = own
        result = values.new_zeros(count)
        result[own] = values
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None, None, None]:
        return above[context.own], None, None, None


class _UsedInParts(torch.autograd.Function):
    @staticmethod
    def forward(context: _ExchangeContext, values: Tensor, group: dist.ProcessGroup, first: int) -> Tensor:
        context.group, context.first = group, first
        return values.view_as(values)

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None, None]:
        parts = above[..., context.first :].contiguous()
        dist.all_reduce(parts, group=context.group)
        return torch.cat([above[..., : context.first], parts], -1), None, None


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        context: _ExchangeContext, values: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        context.group, context.sent, context.received = group, sent, received
        return _moved(values, group, sent, received)

    @staticmethod
    def backward(context: _ExchangeContext, above: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(above, context.group, context.received, context.sent), None, None, None


def _moved(values: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    result = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(result, values.contiguous(), received, sent, group=group)
    return result
