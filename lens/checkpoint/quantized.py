"""The plain tensors that a quantised weight is made of: its integers, scales and zero points."""

from torch import Tensor, nn


def is_plain(tensor: Tensor) -> bool:
    """Whether this is an ordinary tensor, whose numbers are its storage's."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def plain_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself, or what a subclass of torchao's kind holds; () where that is not told.

    >>> import torch
    >>> plain_parts(torch.ones(2))
    (tensor([1., 1.]),)
    """
    if is_plain(tensor):
        return (tensor,)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return ()
    names, _ = flatten()
    return tuple(part for name in names for part in plain_parts(getattr(tensor, name)))


def dequantized(tensor: Tensor) -> Tensor | None:
    """The numbers that a quantised weight stands for, None where it does not tell them."""
    if is_plain(tensor):
        return tensor
    dequantize = getattr(type(tensor), "dequantize", None)
    if dequantize is None or dequantize is Tensor.dequantize:
        return None
    return dequantize(tensor)
