"""Our operators for the gradients of sampling at the places of a grid."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


@function()
def Unnormalized(place, size, align_corners: int = 0):
    """A coordinate of GridSample, from -1 to 1, in elements of an axis of that size; and elements for each unit."""
    one, two = op.CastLike(op.Constant(value_float=1.0), place), op.CastLike(op.Constant(value_float=2.0), place)
    corners = op.CastLike(op.Constant(value_int=align_corners), place)
    rate = (size - corners) / two
    return (place + one) * rate - (one - corners) / two, rate


@function()
def Reflected(place, size, align_corners: int = 0):
    """A coordinate reflected at both ends of an axis until it lies within; and the sign of its slope.

    The ends are the first and last element with ``align_corners``, else the outer edges of both. (torch's
    GridSampler.h says the same.)
    """
    one, two = op.CastLike(op.Constant(value_float=1.0), place), op.CastLike(op.Constant(value_float=2.0), place)
    zero = one - one
    corners = op.CastLike(op.Constant(value_int=align_corners), place)
    low, span = (corners - one) / two, size - corners
    empty = op.Equal(span, zero)
    divisor = op.Where(empty, one, span)
    away = place - low
    distance = op.Abs(away)
    flips = op.Floor(distance / divisor)
    rest = distance - flips * divisor
    odd = op.Equal(flips - op.Floor(flips / two) * two, one)
    found = op.Where(odd, span - rest, rest) + low
    sign = op.Where(op.Less(away, zero), op.Neg(one), one) * op.Where(odd, op.Neg(one), one)
    return op.Where(empty, zero, found), op.Where(empty, zero, sign)


@function()
def Padded(place, size, padding: int, align_corners: int = 0):
    """A coordinate after GridSample's padding, 0 zeros, 1 border, 2 reflection; and its slope, 0 where it was cut."""
    zero, one = op.CastLike(op.Constant(value_float=0.0), place), op.CastLike(op.Constant(value_float=1.0), place)
    way = op.Constant(value_int=padding)
    reflects = op.Equal(way, op.Constant(value_int=2))
    mirrored, sign = own.Reflected(place, size, align_corners=align_corners)
    inner, slope = op.Where(reflects, mirrored, place), op.Where(reflects, sign, one)
    cut = op.Or(op.LessOrEqual(inner, zero), op.GreaterOrEqual(inner, size - one))
    clipped = op.Max(op.Min(inner, size - one), zero)
    free = op.Equal(way, op.Constant(value_int=0))
    return op.Where(free, place, clipped), op.Where(free, one, op.Where(cut, zero, slope))


@function()
def Taps(base, offsets, weights, slopes, size, padding: int, align_corners: int = 0):
    """The elements of an axis at ``base`` plus each offset: where they are, their weights, and the weights' slopes.

    With padding 0 those outside weigh nothing; else padding says which element stands for them.
    """
    zero, one = op.CastLike(op.Constant(value_float=0.0), base), op.CastLike(op.Constant(value_float=1.0), base)
    places = op.Unsqueeze(base, op.Constant(value_ints=[-1])) + offsets
    outside = op.Or(op.Less(places, zero), op.Greater(places, size - one))
    dropped = op.And(outside, op.Equal(op.Constant(value_int=padding), op.Constant(value_int=0)))
    moved, _ = own.Padded(places, size, padding=padding, align_corners=align_corners)
    index = op.Cast(op.Max(op.Min(moved, size - one), zero), to=7)
    return index, op.Where(dropped, zero, weights), op.Where(dropped, zero, slopes)


@function()
def LinearTaps(place, size, padding: int, align_corners: int = 0):
    """Two elements of an axis for each coordinate in elements, with weights and the weights' slopes."""
    one = op.CastLike(op.Constant(value_float=1.0), place)
    last = op.Constant(value_ints=[-1])
    at, slope = own.Padded(place, size, padding=padding, align_corners=align_corners)
    low = op.Floor(at)
    rest = op.Unsqueeze(at - low, last)
    rate = op.Unsqueeze(slope, last)
    offsets = op.CastLike(op.Constant(value_ints=[0, 1]), place)
    weights, slopes = op.Concat(one - rest, rest, axis=-1), op.Concat(op.Neg(rate), rate, axis=-1)
    index, weight, change = own.Taps(low, offsets, weights, slopes, size, padding=padding, align_corners=align_corners)
    return index, weight, change


@function()
def NearestTaps(place, size, padding: int, align_corners: int = 0):
    """The nearest element of an axis for each coordinate, halves to the even one; its weight has no slope."""
    at, _ = own.Padded(place, size, padding=padding, align_corners=align_corners)
    column = op.Shape(op.Unsqueeze(place, op.Constant(value_ints=[-1])))
    weight = op.Expand(op.CastLike(op.Constant(value_float=1.0), place), column)
    offset = op.CastLike(op.Constant(value_ints=[0]), place)
    flat = weight - weight
    index, share, change = own.Taps(
        op.Round(at), offset, weight, flat, size, padding=padding, align_corners=align_corners
    )
    return index, share, change


@function()
def CubicSlope(distance, cubic_coeff_a: float = -0.75):
    """The derivative of CubicKernel by a distance of either sign."""
    a = op.CastLike(op.Constant(value_float=cubic_coeff_a), distance)
    one = op.CastLike(op.Constant(value_float=1.0), distance)
    two = one + one
    d = op.Abs(distance)
    near = (two + one) * (a + two) * d * d - two * (a + two + one) * d
    far = a * ((two + one) * d * d - (two + two + one) * two * d + (two + two) * two)
    found = op.Where(op.LessOrEqual(d, one), near, op.Where(op.Less(d, two), far, d - d))
    return found * op.Sign(distance)


@function()
def CubicTaps(place, size, padding: int, align_corners: int = 0):
    """Four elements of an axis for each coordinate, with weights and the weights' slopes (Keys, 1981)."""
    low = op.Floor(place)
    offsets = op.CastLike(op.Constant(value_ints=[-1, 0, 1, 2]), place)
    distance = op.Unsqueeze(place - low, op.Constant(value_ints=[-1])) - offsets
    weights, slopes = own.CubicKernel(distance, cubic_coeff_a=-0.75), own.CubicSlope(distance, cubic_coeff_a=-0.75)
    index, weight, change = own.Taps(low, offsets, weights, slopes, size, padding=padding, align_corners=align_corners)
    return index, weight, change


@function()
def TapsGrad(dy, x, zi, zw, zs, yi, yw, ys, xi, xw, xs):
    """Gradients of sums over elements of x, (n, channels, depth, height, width), at places given axis by axis.

    dy is (n, channels, places). Each axis has indices, weights and slopes of shape (n, places, taps). Returns dx, and
    the gradients of the coordinates, (n, places) each, in the order z, y, x.
    """
    last, second = op.Constant(value_ints=[-1]), op.Constant(value_ints=[1])
    zd, yd, xd = op.Constant(value_ints=[3, 4]), op.Constant(value_ints=[2, 4]), op.Constant(value_ints=[2, 3])
    rows, height, width = op.Shape(x, start=0, end=2), op.Shape(x, start=3, end=4), op.Shape(x, start=4, end=5)
    index = (op.Unsqueeze(zi, zd) * height + op.Unsqueeze(yi, yd)) * width + op.Unsqueeze(xi, xd)
    zv, yv, xv = op.Unsqueeze(zw, zd), op.Unsqueeze(yw, yd), op.Unsqueeze(xw, xd)
    spread = op.Concat(op.Shape(zw, start=0, end=2), last, axis=0)
    flat_index = op.Reshape(index, op.Concat(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1, -1]), axis=0))
    every = op.Expand(flat_index, op.Concat(rows, op.Shape(flat_index, start=2), axis=0))
    weights = op.Unsqueeze(op.Reshape(zv * yv * xv, spread), second)
    updates = op.Reshape(op.Unsqueeze(dy, last) * weights, op.Shape(every))
    flat = op.Reshape(x, op.Constant(value_ints=[0, 0, -1]))
    zeros = op.Expand(op.CastLike(op.Constant(value_float=0.0), x), op.Shape(flat))
    dx = op.ScatterElements(zeros, every, updates, axis=2, reduction="add")
    taps = op.Concat(op.Shape(dy), last, axis=0)
    values = op.Reshape(op.GatherElements(flat, every, axis=2), taps)
    share = op.ReduceSum(op.Unsqueeze(dy, last) * values, second, keepdims=0)
    dz = op.ReduceSum(share * op.Reshape(op.Unsqueeze(zs, zd) * yv * xv, spread), last, keepdims=0)
    dyy = op.ReduceSum(share * op.Reshape(zv * op.Unsqueeze(ys, yd) * xv, spread), last, keepdims=0)
    dxx = op.ReduceSum(share * op.Reshape(zv * yv * op.Unsqueeze(xs, xd), spread), last, keepdims=0)
    return op.Reshape(dx, op.Shape(x)), dz, dyy, dxx


@function()
def GridPlaces(x, grid, align_corners: int = 0):
    """Where a grid (n, ..., 3) reads in x (n, channels, depth, height, width).

    For each axis, depth first, the places (n, points) in elements, and what one unit of the grid is in elements; then
    the three sizes.
    """
    three = op.Reshape(grid, op.Constant(value_ints=[0, -1, 3]))
    u, v, w = op.Split(three, axis=2, num_outputs=3)
    last = op.Constant(value_ints=[2])
    depth, height, width = op.Split(op.CastLike(op.Shape(x, start=2), x), num_outputs=3)
    z, zr = own.Unnormalized(op.Squeeze(w, last), depth, align_corners=align_corners)
    y, yr = own.Unnormalized(op.Squeeze(v, last), height, align_corners=align_corners)
    h, hr = own.Unnormalized(op.Squeeze(u, last), width, align_corners=align_corners)
    return z, zr, y, yr, h, hr, depth, height, width


@function(like=(1, 2))
def GridSampleGrad(dy, x, grid, padding: int = 0, align_corners: int = 0):
    """Gradient of GridSample in linear mode: dx, dgrid; x is (n, channels, depth, height, width), grid (n, ..., 3)."""
    z, zr, y, yr, h, hr, depth, height, width = own.GridPlaces(x, grid, align_corners=align_corners)
    last = op.Constant(value_ints=[2])
    zi, zw, zs = own.LinearTaps(z, depth, padding=padding, align_corners=align_corners)
    yi, yw, ys = own.LinearTaps(y, height, padding=padding, align_corners=align_corners)
    xi, xw, xs = own.LinearTaps(h, width, padding=padding, align_corners=align_corners)
    flat = op.Reshape(dy, op.Constant(value_ints=[0, 0, -1]))
    dx, dz, dyy, dxx = own.TapsGrad(flat, x, zi, zw, zs, yi, yw, ys, xi, xw, xs)
    made = op.Concat(op.Unsqueeze(dxx * hr, last), op.Unsqueeze(dyy * yr, last), op.Unsqueeze(dz * zr, last), axis=2)
    return dx, op.Reshape(made, op.Shape(grid))


@function(like=(1,))
def NearestGridSampleGrad(dy, x, grid, padding: int = 0, align_corners: int = 0):
    """Gradient of GridSample in nearest mode: dx; shapes as above. The grid's is 0."""
    z, _, y, _, h, _, depth, height, width = own.GridPlaces(x, grid, align_corners=align_corners)
    zi, zw, zs = own.NearestTaps(z, depth, padding=padding, align_corners=align_corners)
    yi, yw, ys = own.NearestTaps(y, height, padding=padding, align_corners=align_corners)
    xi, xw, xs = own.NearestTaps(h, width, padding=padding, align_corners=align_corners)
    flat = op.Reshape(dy, op.Constant(value_ints=[0, 0, -1]))
    dx, _, _, _ = own.TapsGrad(flat, x, zi, zw, zs, yi, yw, ys, xi, xw, xs)
    return dx


@function(like=(1, 2))
def CubicGridSampleGrad(dy, x, grid, padding: int = 0, align_corners: int = 0):
    """Gradient of GridSample in cubic mode: dx, dgrid; x is (n, channels, 1, height, width), grid (n, ..., 3)."""
    z, _, y, yr, h, hr, depth, height, width = own.GridPlaces(x, grid, align_corners=align_corners)
    last = op.Constant(value_ints=[2])
    zi, zw, zs = own.NearestTaps(z, depth, padding=padding, align_corners=align_corners)
    yi, yw, ys = own.CubicTaps(y, height, padding=padding, align_corners=align_corners)
    xi, xw, xs = own.CubicTaps(h, width, padding=padding, align_corners=align_corners)
    flat = op.Reshape(dy, op.Constant(value_ints=[0, 0, -1]))
    dx, dz, dyy, dxx = own.TapsGrad(flat, x, zi, zw, zs, yi, yw, ys, xi, xw, xs)
    made = op.Concat(op.Unsqueeze(dxx * hr, last), op.Unsqueeze(dyy * yr, last), op.Unsqueeze(dz, last), axis=2)
    return dx, op.Reshape(made, op.Shape(grid))
