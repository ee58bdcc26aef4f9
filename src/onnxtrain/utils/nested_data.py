"""Nested data as a flat list of tensors and a schema, and back: what ORTModule does with inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from onnxtrain.capture import Schema, flatten
from onnxtrain.errors import UnsupportedDataError

ORTModelInputOutputType: TypeAlias = Any  # tensors, numbers, strings, None, and structures of them
ORTModelInputOutputSchemaType: TypeAlias = Schema


class PrimitiveType:
    """Numbers that can be tensors: int, float and bool."""

    _DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}

    @classmethod
    def is_primitive_type(cls, value: Any) -> bool:
        """Whether a value is one of them."""
        return type(value) in cls._DTYPES

    @classmethod
    def get_tensor(cls, value: float, device: torch.device | str | None = None) -> torch.Tensor:
        """A tensor without dimensions: int64, float32 or bool."""
        return torch.tensor(value, dtype=cls._DTYPES[type(value)], device=device)


def extract_data_and_schema(
    data: Any, constant_as_tensor: bool = False, device: torch.device | str | None = None
) -> tuple[list[torch.Tensor], Schema]:
    """The tensors of a nested structure in order, and the schema that restores it.

    Lists, tuples, dicts, named tuples, ordered dicts, dataclasses and Transformers' ModelOutputs are taken apart;
    strings and None stay in the schema.

    Args:
        data: the structure.
        constant_as_tensor: numbers and bools become tensors too; else they stay in the schema.
        device: where the tensors are moved to; None leaves them where they are.

    Raises:
        UnsupportedDataError: the structure holds something else; the message says where.
    """
    if constant_as_tensor:
        data = pytree.tree_map_only((bool, int, float), lambda value: torch.tensor(value, device=device), data)
    tensors, schema = flatten(data, "data")
    return (tensors if device is None else [t.to(device) for t in tensors]), schema


def unflatten_data_using_schema(data: Sequence[torch.Tensor], schema: Schema) -> Any:
    """The structure of a schema with these tensors in it, in order.

    Raises:
        UnsupportedDataError: there are more or fewer tensors than the schema has places.
    """
    if len(data) != schema.tensors:
        raise UnsupportedDataError(
            f"the schema has places for {schema.tensors} tensors, and {len(data)} are given",
            cure="give what extract_data_and_schema returned, in its order",
        )
    return schema.restore(data)
