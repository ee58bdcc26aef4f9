"""Operators on shapes: what they give is known as symbolic *data*, so that Reshape and Expand keep their dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxtrain.ir.shapes import (
    Data,
    Dim,
    Dims,
    Facts,
    attribute,
    broadcast,
    constant_of,
    data_of,
    dims_of,
    dtype_of,
    fresh_dim,
    fresh_dims,
    known_dims,
    operand,
    product,
    quotient,
    shape_rule,
    simplify,
)

INT64 = ir.DataType.INT64


@shape_rule("Shape")
def shape(node: ir.Node) -> Sequence[Facts]:
    """The dimensions of the operand, from ``start`` to ``end``."""
    dims = dims_of(node.inputs[0])  # type: ignore[arg-type]
    if dims is None:
        return [Facts(INT64, (fresh_dim(node.outputs[0], 0),))]
    part = dims[slice(attribute(node, "start", 0), attribute(node, "end"))]
    return [Facts(INT64, (len(part),), part)]


@shape_rule("Size")
def size(node: ir.Node) -> Sequence[Facts]:
    """The product of the operand's dimensions."""
    dims = dims_of(node.inputs[0])  # type: ignore[arg-type]
    return [Facts(INT64, (), None if dims is None else product(dims))]


@shape_rule("Constant")
def constant(node: ir.Node) -> Sequence[Facts]:
    """Type, shape and content of the constant."""
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is None:
        return [Facts(ir.DataType.UNDEFINED, None)]
    data: Data | None = None
    if tensor.dtype.is_integer() and len(tensor.shape) <= 1 and tensor.size <= 64:
        array = tensor.numpy()
        data = tuple(array.tolist()) if array.ndim else int(array)
    return [Facts(tensor.dtype, tuple(tensor.shape.numpy()), data)]


@shape_rule("ConstantOfShape")
def constant_of_shape(node: ir.Node) -> Sequence[Facts]:
    """The shape is the operand's content."""
    value = attribute(node, "value")
    dtype = ir.DataType.FLOAT if value is None else value.dtype
    dims = dims_from(node.inputs[0], node.outputs[0])
    data: Data | None = None
    if (
        value is not None
        and value.dtype.is_integer()
        and dims is not None
        and len(dims) == 1
        and isinstance(dims[0], int)
    ):
        data = (int(value.numpy().reshape(-1)[0]),) * dims[0] if dims[0] <= 64 else None
    return [Facts(dtype, dims, data)]


@shape_rule("Range")
def range_(node: ir.Node) -> Sequence[Facts]:
    """``ceil((limit - start) / delta)`` elements."""
    start, limit, delta = (data_of(v) for v in node.inputs)
    dim: Dim = fresh_dim(node.outputs[0], 0)
    if start is not None and limit is not None and delta == 1 and not isinstance(start, tuple):
        dim = simplify(limit - start) if start != 0 else limit  # type: ignore[operator,assignment]
    data = None
    if isinstance(start, int) and isinstance(dim, int) and dim <= 64 and dtype_of(node.inputs[0]).is_integer():  # type: ignore[arg-type]
        data = tuple(range(start, start + dim))
    return [Facts(dtype_of(node.inputs[0]), (dim,), data)]  # type: ignore[arg-type]


@shape_rule("Reshape")
def reshape(node: ir.Node) -> Sequence[Facts]:
    """Zero copies a dimension (unless ``allowzero``), -1 takes what is left."""
    x, wanted = node.inputs[0], data_of(node.inputs[1])
    assert x is not None
    if not isinstance(wanted, tuple):
        count = dims_of(node.inputs[1])  # type: ignore[arg-type]
        known = count is not None and len(count) == 1 and isinstance(count[0], int)
        return [Facts(dtype_of(x), fresh_dims(node.outputs[0], count[0]) if known else None)]  # type: ignore[index,arg-type]
    source = dims_of(x)
    keep_zero = attribute(node, "allowzero", 0)
    dims: list[Dim] = [
        source[i] if d == 0 and not keep_zero and source is not None and i < len(source) else d
        for i, d in enumerate(wanted)
    ]
    if -1 in dims:
        hole = dims.index(-1)
        rest = [d for i, d in enumerate(dims) if i != hole]
        dims[hole] = fresh_dim(node.outputs[0], hole) if source is None else _left_over(source, rest)
    dims = [
        fresh_dim(node.outputs[0], i) if not isinstance(d, int) and d.value is None else d for i, d in enumerate(dims)
    ]
    data = data_of(x)
    if isinstance(data, tuple) and len(dims) == 1:
        return [Facts(dtype_of(x), tuple(dims), data)]
    if isinstance(data, tuple) and not dims and len(data) == 1:
        return [Facts(dtype_of(x), (), data[0])]
    if data is not None and not isinstance(data, tuple) and dims == [1]:
        return [Facts(dtype_of(x), (1,), (data,))]
    return [Facts(dtype_of(x), tuple(dims))]


@shape_rule("Flatten")
def flatten(node: ir.Node) -> Sequence[Facts]:
    """The axes before ``axis``, and the rest."""
    x = node.inputs[0]
    assert x is not None
    dims, axis = dims_of(x), attribute(node, "axis", 1)
    if dims is None:
        return [Facts(dtype_of(x), fresh_dims(node.outputs[0], 2))]
    axis = axis + len(dims) if axis < 0 else axis
    return [Facts(dtype_of(x), (product(dims[:axis]), product(dims[axis:])))]


def _left_over(source: Dims, rest: Sequence[Dim]) -> Dim:
    """``product(source) / product(rest)``, common dimensions cancelled first."""
    top, bottom = list(source), []
    for dim in rest:
        if dim in top:
            top.remove(dim)
        else:
            bottom.append(dim)
    return quotient(product(top), product(bottom)) if bottom else product(top)


@shape_rule("Expand")
def expand(node: ir.Node) -> Sequence[Facts]:
    """Broadcast to the shape that the second operand holds."""
    x = node.inputs[0]
    assert x is not None
    wanted = dims_from(node.inputs[1], node.outputs[0])
    if wanted is None:
        return [Facts(dtype_of(x), None)]
    known = isinstance(data_of(node.inputs[1]), tuple)
    dims = broadcast(known_dims(x), wanted, node=node) if known else wanted  # unknown, it is at least as large as x
    data = data_of(x)
    if data is not None and len(dims) == 1 and isinstance(dims[0], int) and dims[0] <= 64:
        parts = data if isinstance(data, tuple) else (data,)
        data = parts * dims[0] if len(parts) == 1 else parts
    else:
        data = None
    return [Facts(dtype_of(x), dims, data)]


@shape_rule("Squeeze")
def squeeze(node: ir.Node) -> Sequence[Facts]:
    """Drop the axes, or those that ``squeezed_axes`` tells."""
    x = node.inputs[0]
    assert x is not None
    dims, axes = known_dims(x), squeezed_axes(node)
    if axes is None:
        return [Facts(dtype_of(x), fresh_dims(node.outputs[0], len(dims_of(node.outputs[0]) or ())))]
    dropped = {a % max(len(dims), 1) for a in axes}
    data = data_of(x)
    if isinstance(data, tuple) and dropped:
        data = data[0]
    return [Facts(dtype_of(x), tuple(d for i, d in enumerate(dims) if i not in dropped), data)]


def squeezed_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes that a Squeeze drops; None where the rank that its result states fits none.

    Without axes it drops all of size 1: those without a known size are taken for longer, unless the rank says else.
    """
    x = node.inputs[0]
    assert x is not None
    dims, axes, stated = known_dims(x), axes_of(node, 1), dims_of(node.outputs[0])
    if axes is not None:
        return axes
    ones, unknown = ([i for i, d in enumerate(dims) if f(d)] for f in (_is_one, _is_symbol))
    if stated is not None and len(stated) == len(dims) - len(ones) - len(unknown):
        return (*ones, *unknown)
    return tuple(ones) if stated is None or len(stated) == len(dims) - len(ones) else None


def _is_one(dim: Dim) -> bool:
    return isinstance(dim, int) and dim == 1


def _is_symbol(dim: Dim) -> bool:
    return not isinstance(dim, int)


@shape_rule("Unsqueeze")
def unsqueeze(node: ir.Node) -> Sequence[Facts]:
    """Add axes of size 1."""
    x, axes = node.inputs[0], axes_of(node, 1)
    assert x is not None
    if axes is None:
        return [Facts(dtype_of(x), None)]
    dims = list(known_dims(x))
    total = len(dims) + len(axes)
    for axis in sorted(a % total for a in axes):
        dims.insert(axis, 1)
    data = data_of(x)
    data = (data,) if data is not None and not isinstance(data, tuple) and len(dims) == 1 else None
    return [Facts(dtype_of(x), tuple(dims), data)]


@shape_rule("Concat")
def concat(node: ir.Node) -> Sequence[Facts]:
    """Sizes add up along the axis."""
    given = [v for v in node.inputs if v is not None]
    shapes = [dims_of(v) for v in given]
    if any(s is None for s in shapes):
        return [Facts(dtype_of(given[0]), None)]
    dims = list(shapes[0])  # type: ignore[arg-type]
    axis = attribute(node, "axis", 0) % len(dims)
    total: Dim = 0
    for s in shapes:
        total = total + s[axis]  # type: ignore[operator,index]
    dims[axis] = simplify(total)
    for i in range(len(dims)):
        constants = [s[i] for s in shapes if isinstance(s[i], int)]  # type: ignore[index]
        if i != axis and constants:
            dims[i] = constants[0]
    data: Data | None = None
    if len(dims) == 1:
        parts = [data_of(v) for v in given]
        if all(isinstance(p, tuple) for p in parts):
            data = tuple(d for p in parts for d in p)  # type: ignore[union-attr]
    return [Facts(dtype_of(given[0]), tuple(dims), data)]


@shape_rule("Gather")
def gather(node: ir.Node) -> Sequence[Facts]:
    """The indices' shape replaces the axis."""
    x, indices = node.inputs
    assert x is not None and indices is not None
    dims, inner = known_dims(x), dims_of(indices)
    if inner is None:
        return [Facts(dtype_of(x), None)]
    axis = attribute(node, "axis", 0) % len(dims)
    data, at = data_of(x), data_of(indices)
    picked: Data | None = None
    if isinstance(data, tuple) and isinstance(at, int):
        picked = data[at]
    elif isinstance(data, tuple) and isinstance(at, tuple) and all(isinstance(i, int) for i in at):
        picked = tuple(data[i] for i in at)  # type: ignore[index]
    return [Facts(dtype_of(x), dims[:axis] + inner + dims[axis + 1 :], picked)]


@shape_rule("Cast")
def cast(node: ir.Node) -> Sequence[Facts]:
    """The type changes; integers keep their content."""
    x = node.inputs[0]
    assert x is not None
    dtype = ir.DataType(attribute(node, "to"))
    return [Facts(dtype, dims_of(x), data_of(x) if dtype.is_integer() else None)]


@shape_rule("CastLike")
def cast_like(node: ir.Node) -> Sequence[Facts]:
    """The second operand's type; integers keep their content."""
    x, model = node.inputs
    assert x is not None and model is not None
    dtype = dtype_of(model)
    return [Facts(dtype, dims_of(x), data_of(x) if dtype.is_integer() else None)]


@shape_rule("Tile")
def tile(node: ir.Node) -> Sequence[Facts]:
    """Every dimension times its repeats."""
    x = node.inputs[0]
    assert x is not None
    repeats, dims = data_of(node.inputs[1]), known_dims(x)
    if not isinstance(repeats, tuple):
        return [Facts(dtype_of(x), fresh_dims(node.outputs[0], len(dims)))]
    return [Facts(dtype_of(x), tuple(product(pair) for pair in zip(dims, repeats, strict=True)))]


@shape_rule("Split")
def split(node: ir.Node) -> Sequence[Facts]:
    """Given sizes, or equal parts of which the last may be smaller."""
    x = node.inputs[0]
    assert x is not None
    dims, axis, count = known_dims(x), attribute(node, "axis", 0), len(node.outputs)
    axis %= len(dims)
    sizes = data_of(operand(node, 1))
    if not isinstance(sizes, tuple):
        sizes = _even_parts(dims[axis], count) if operand(node, 1) is None else None
    facts = []
    for index, value in enumerate(node.outputs):
        part = fresh_dim(value, axis) if sizes is None else sizes[index]
        facts.append(Facts(dtype_of(x), (*dims[:axis], part, *dims[axis + 1 :])))
    return facts


def _even_parts(dim: Dim, count: int) -> Dims | None:
    if not isinstance(dim, int):
        return None
    part = -(-dim // count)
    return (*[part] * (count - 1), dim - part * (count - 1))


def axes_of(node: ir.Node, index: int) -> tuple[int, ...] | None:
    """The axes that an operand holds; None where there is none or its content is not known."""
    content = constant_of(operand(node, index))
    if content is not None:
        return tuple(int(a) for a in content.reshape(-1))
    data = data_of(operand(node, index))
    return data if isinstance(data, tuple) and all(isinstance(d, int) for d in data) else None  # type: ignore[return-value]


def dims_from(value: ir.Value | None, result: ir.Value) -> Dims | None:
    """A shape operand's content as dimensions; unknown parts become new symbols."""
    data = data_of(value)
    if isinstance(data, tuple):
        return tuple(
            fresh_dim(result, i) if not isinstance(d, int) and d.value is None else d for i, d in enumerate(data)
        )
    count = None if value is None else dims_of(value)
    if count is None or len(count) != 1 or not isinstance(count[0], int):
        return None
    return fresh_dims(result, count[0])


def _arithmetic(compute: Callable[[Dim, Dim], Dim | None]) -> Callable[[ir.Node], Sequence[Facts]]:
    def rule(node: ir.Node) -> Sequence[Facts]:
        operands = [v for v in node.inputs if v is not None]
        shapes = [dims_of(v) for v in operands]
        dims = None if None in shapes else broadcast(*shapes, node=node)  # type: ignore[arg-type]
        dtype = next((v.dtype for v in operands if v.dtype), ir.DataType.UNDEFINED)
        if dims is None or not dtype.is_integer():
            return [Facts(dtype, dims)]
        return [Facts(dtype, dims, functools.reduce(functools.partial(_each, compute), map(data_of, operands)))]

    return rule


def _each(compute: Callable[[Dim, Dim], Dim | None], a: Data | None, b: Data | None) -> Data | None:
    if a is None or b is None:
        return None
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return compute(a, b)
    left = a if isinstance(a, tuple) else (a,) * len(b)  # type: ignore[arg-type]
    right = b if isinstance(b, tuple) else (b,) * len(left)
    if len(left) != len(right):
        left, right = (left * len(right), right) if len(left) == 1 else (left, right * len(left))
    made = tuple(compute(x, y) for x, y in zip(left, right, strict=True))
    return None if any(m is None for m in made) else made  # type: ignore[return-value]


def _divide(a: Dim, b: Dim) -> Dim | None:
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b) if b else None  # ONNX integer division truncates
    if isinstance(a, int):  # SymbolicDim has no division of a number by it
        return 0 if a == 0 else None
    return simplify(a // b) if b != 0 else None


def _modulo(a: Dim, b: Dim) -> Dim | None:
    return a % b if isinstance(a, int) and isinstance(b, int) and b else None


def _extreme(sign: int, a: Dim, b: Dim) -> Dim | None:
    """The larger or the smaller one, where that is the same for all sizes, those included that content makes 0."""
    difference = simplify(a - b)
    return None if not isinstance(difference, int) else a if sign * difference >= 0 else b


shape_rule("Max")(_arithmetic(functools.partial(_extreme, 1)))
shape_rule("Min")(_arithmetic(functools.partial(_extreme, -1)))
shape_rule("Add")(_arithmetic(lambda a, b: simplify(a + b)))
shape_rule("Sub")(_arithmetic(lambda a, b: simplify(a - b)))
shape_rule("Mul")(_arithmetic(lambda a, b: simplify(a * b)))
shape_rule("Div")(_arithmetic(_divide))
shape_rule("Mod")(_arithmetic(_modulo))
