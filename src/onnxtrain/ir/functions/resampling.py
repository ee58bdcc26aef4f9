"""Our operators for the gradients of resizing and of sampling at given places."""

from __future__ import annotations

from onnxscript import opset20 as op
from onnxscript import values

from onnxtrain.ir.functions import DOMAIN, VERSION, function

own = values.Opset(DOMAIN, VERSION)


@function()
def ResizeCoordinates(size, count, scale, start, end, coordinates: int):
    """Where the ``count`` elements of a resized axis lie on the original of that size, as doubles.

    ``coordinates`` says how: 0 half_pixel, 1 pytorch_half_pixel, 2 asymmetric, 3 align_corners, 4 tf_crop_and_resize
    between ``start`` and ``end``, 5 half_pixel_symmetric. All inputs are double scalars; formulas of ONNX's Resize.
    """
    zero, one = op.Cast(op.Constant(value_float=0.0), to=11), op.Cast(op.Constant(value_float=1.0), to=11)
    half = op.Cast(op.Constant(value_float=0.5), to=11)
    way = op.Constant(value_int=coordinates)
    places = op.Range(zero, count, one)
    single = op.LessOrEqual(count, one)
    last = op.Where(single, one, count - one)
    centred = (places + half) / scale - half
    wide = size * scale
    symmetric = centred + size * half * (one - count / wide)
    crop = op.Where(single, half * (start + end) * (size - one), start * (size - one))
    crop = crop + op.Where(single, zero, (end - start) * (size - one) / last) * places
    found = op.Where(op.Equal(way, op.Constant(value_int=5)), symmetric, centred)
    found = op.Where(op.Equal(way, op.Constant(value_int=4)), crop, found)
    found = op.Where(op.Equal(way, op.Constant(value_int=3)), places * ((size - one) / last), found)
    found = op.Where(op.Equal(way, op.Constant(value_int=2)), places / scale, found)
    return op.Where(op.And(op.Equal(way, op.Constant(value_int=1)), single), zero * places, found)


@function()
def CubicKernel(distance, cubic_coeff_a: float = -0.75):
    """The weight of an element at a distance in cubic convolution (Keys, 1981, equation 4)."""
    a = op.CastLike(op.Constant(value_float=cubic_coeff_a), distance)
    one = op.CastLike(op.Constant(value_float=1.0), distance)
    two = one + one
    d = op.Abs(distance)
    near = ((a + two) * d - (a + two + one)) * d * d + one
    far = ((a * d - (two + two + one) * a) * d + (two + two) * two * a) * d - (two + two) * a
    return op.Where(op.LessOrEqual(d, one), near, op.Where(op.Less(d, two), far, d - d))


@function()
def ResizeMatrix(
    size,
    count,
    scale,
    start,
    end,
    mode: int,
    coordinates: int,
    nearest: int = 0,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
):
    """The matrix (count, size) in double by which Resize multiplies one axis.

    ``mode`` is 0 nearest, 1 linear, 2 cubic; ``nearest`` 0 round_prefer_floor, 1 round_prefer_ceil, 2 floor, 3 ceil.
    Elements that lie outside count as the first or the last one, or, with ``exclude_outside``, not at all; with
    ``antialias`` the kernel of a smaller result is as much wider. Outside a crop all weights are 0.
    """
    zero, one = op.Cast(op.Constant(value_float=0.0), to=11), op.Cast(op.Constant(value_float=1.0), to=11)
    half, two = op.Cast(op.Constant(value_float=0.5), to=11), op.Cast(op.Constant(value_float=2.0), to=11)
    column, row = op.Constant(value_ints=[1]), op.Constant(value_ints=[0])
    exact = own.ResizeCoordinates(size, count, scale, start, end, coordinates=coordinates)
    last = size - one
    places = op.Unsqueeze(op.Max(op.Min(exact, size + one), zero - two), column)
    way = op.Constant(value_int=nearest)
    rounded = op.Where(op.Equal(way, op.Constant(value_int=1)), op.Floor(places + half), op.Ceil(places - half))
    rounded = op.Where(op.Equal(way, op.Constant(value_int=2)), op.Floor(places), rounded)
    rounded = op.Where(op.Equal(way, op.Constant(value_int=3)), op.Ceil(places), rounded)
    chosen = op.Max(op.Min(rounded, last), zero)
    inner = op.Unsqueeze(op.Range(zero, size, one), row)
    picked = op.Cast(op.Equal(chosen, inner), to=11)
    squeezed = op.Where(op.Equal(op.Constant(value_int=antialias), op.Constant(value_int=1)), op.Min(scale, one), one)
    margin = op.Ceil(two / squeezed) + two
    framed = op.Unsqueeze(op.Range(zero - margin, size + margin, one), row)
    distance = (framed - places) * squeezed
    linear = op.Max(one - op.Abs(distance), zero)
    cubic = own.CubicKernel(distance, cubic_coeff_a=cubic_coeff_a)
    weights = op.Where(op.Equal(op.Constant(value_int=mode), op.Constant(value_int=2)), cubic, linear)
    edge = op.Cast(op.Reshape(margin, column), to=7)
    parts = op.Concat(edge, op.Cast(op.Reshape(size, column), to=7), edge, axis=0)
    before, within, after = op.Split(weights, parts, axis=1)
    first, final = op.Cast(op.Equal(inner, zero), to=11), op.Cast(op.Equal(inner, last), to=11)
    clamped = within + op.ReduceSum(before, column, keepdims=1) * first
    clamped = clamped + op.ReduceSum(after, column, keepdims=1) * final
    kept = op.Where(op.Equal(op.Constant(value_int=exclude_outside), op.Constant(value_int=1)), within, clamped)
    total = op.ReduceSum(kept, column, keepdims=1)
    smooth = kept / op.Where(op.Equal(total, zero), one, total)
    made = op.Where(op.Equal(op.Constant(value_int=mode), op.Constant(value_int=0)), picked, smooth)
    outside = op.Or(op.Less(exact, zero), op.Greater(exact, last))
    cropped = op.And(op.Equal(op.Constant(value_int=coordinates), op.Constant(value_int=4)), outside)
    return op.Where(op.Unsqueeze(cropped, column), zero, made)


@function()
def ResizeGrad(
    dy,
    sizes,
    scales,
    roi,
    mode: int,
    coordinates: int,
    nearest: int = 0,
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
):
    """Gradient of Resize over three axes, the last: dy multiplied along each by its matrix, transposed.

    dy has shape (n, depth, height, width); sizes are the operand's, scales three doubles, roi the three starts and
    then the three ends, doubles too.
    """
    counts = op.Cast(op.Shape(dy, start=1), to=11)
    lengths = op.Cast(sizes, to=11)
    d0, d1, d2 = op.Split(lengths, num_outputs=3)
    c0, c1, c2 = op.Split(counts, num_outputs=3)
    s0, s1, s2 = op.Split(scales, num_outputs=3)
    a0, a1, a2, b0, b1, b2 = op.Split(roi, num_outputs=6)
    depth = own.ResizeMatrix(
        op.Squeeze(d0), op.Squeeze(c0), op.Squeeze(s0), op.Squeeze(a0), op.Squeeze(b0), mode=mode, nearest=nearest,
        coordinates=coordinates, cubic_coeff_a=cubic_coeff_a, exclude_outside=exclude_outside, antialias=antialias,
    )  # fmt: skip
    height = own.ResizeMatrix(
        op.Squeeze(d1), op.Squeeze(c1), op.Squeeze(s1), op.Squeeze(a1), op.Squeeze(b1), mode=mode, nearest=nearest,
        coordinates=coordinates, cubic_coeff_a=cubic_coeff_a, exclude_outside=exclude_outside, antialias=antialias,
    )  # fmt: skip
    width = own.ResizeMatrix(
        op.Squeeze(d2), op.Squeeze(c2), op.Squeeze(s2), op.Squeeze(a2), op.Squeeze(b2), mode=mode, nearest=nearest,
        coordinates=coordinates, cubic_coeff_a=cubic_coeff_a, exclude_outside=exclude_outside, antialias=antialias,
    )  # fmt: skip
    rows = op.MatMul(dy, op.CastLike(width, dy))
    planes = op.MatMul(op.CastLike(op.Transpose(height, perm=[1, 0]), dy), rows)
    flat = op.Reshape(
        planes, op.Concat(op.Shape(dy, start=0, end=2), op.Constant(value_ints=[-1]), axis=0), allowzero=0
    )
    made = op.MatMul(op.CastLike(op.Transpose(depth, perm=[1, 0]), dy), flat)
    return op.Reshape(made, op.Concat(op.Shape(dy, start=0, end=1), sizes, axis=0))


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


@function(like=(1, 2))
def GridSampleGrad(dy, x, grid, padding: int = 0, align_corners: int = 0):
    """Gradient of GridSample in linear mode: dx, dgrid; x is (n, channels, depth, height, width), grid (n, ..., 3)."""
    three = op.Reshape(grid, op.Constant(value_ints=[0, -1, 3]))
    u, v, w = op.Split(three, axis=2, num_outputs=3)
    last = op.Constant(value_ints=[2])
    depth, height, width = op.Split(op.CastLike(op.Shape(x, start=2), x), num_outputs=3)
    z, zr = own.Unnormalized(op.Squeeze(w, last), depth, align_corners=align_corners)
    y, yr = own.Unnormalized(op.Squeeze(v, last), height, align_corners=align_corners)
    h, hr = own.Unnormalized(op.Squeeze(u, last), width, align_corners=align_corners)
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
    three = op.Reshape(grid, op.Constant(value_ints=[0, -1, 3]))
    u, v, w = op.Split(three, axis=2, num_outputs=3)
    last = op.Constant(value_ints=[2])
    depth, height, width = op.Split(op.CastLike(op.Shape(x, start=2), x), num_outputs=3)
    z, _ = own.Unnormalized(op.Squeeze(w, last), depth, align_corners=align_corners)
    y, _ = own.Unnormalized(op.Squeeze(v, last), height, align_corners=align_corners)
    h, _ = own.Unnormalized(op.Squeeze(u, last), width, align_corners=align_corners)
    zi, zw, zs = own.NearestTaps(z, depth, padding=padding, align_corners=align_corners)
    yi, yw, ys = own.NearestTaps(y, height, padding=padding, align_corners=align_corners)
    xi, xw, xs = own.NearestTaps(h, width, padding=padding, align_corners=align_corners)
    flat = op.Reshape(dy, op.Constant(value_ints=[0, 0, -1]))
    dx, _, _, _ = own.TapsGrad(flat, x, zi, zw, zs, yi, yw, ys, xi, xw, xs)
    return dx


@function(like=(1, 2))
def CubicGridSampleGrad(dy, x, grid, padding: int = 0, align_corners: int = 0):
    """Gradient of GridSample in cubic mode: dx, dgrid; x is (n, channels, 1, height, width), grid (n, ..., 3)."""
    three = op.Reshape(grid, op.Constant(value_ints=[0, -1, 3]))
    u, v, w = op.Split(three, axis=2, num_outputs=3)
    last = op.Constant(value_ints=[2])
    depth, height, width = op.Split(op.CastLike(op.Shape(x, start=2), x), num_outputs=3)
    z, _ = own.Unnormalized(op.Squeeze(w, last), depth, align_corners=align_corners)
    y, yr = own.Unnormalized(op.Squeeze(v, last), height, align_corners=align_corners)
    h, hr = own.Unnormalized(op.Squeeze(u, last), width, align_corners=align_corners)
    zi, zw, zs = own.NearestTaps(z, depth, padding=padding, align_corners=align_corners)
    yi, yw, ys = own.CubicTaps(y, height, padding=padding, align_corners=align_corners)
    xi, xw, xs = own.CubicTaps(h, width, padding=padding, align_corners=align_corners)
    flat = op.Reshape(dy, op.Constant(value_ints=[0, 0, -1]))
    dx, dz, dyy, dxx = own.TapsGrad(flat, x, zi, zw, zs, yi, yw, ys, xi, xw, xs)
    made = op.Concat(op.Unsqueeze(dxx * hr, last), op.Unsqueeze(dyy * yr, last), op.Unsqueeze(dz, last), axis=2)
    return dx, op.Reshape(made, op.Shape(grid))


@function()
def RoiMatrix(starts, ends, size, count: int, sampling_ratio: int = 0, half_pixel: int = 1):
    """The matrices (rois, count, size) by which RoiAlign averages one axis of that size in ``count`` bins.

    Each bin is the mean of ``sampling_ratio`` linear samples, or, with 0, of as many as the bin has elements, rounded
    up. A sample more than one element outside is 0. (The same formulas as in Detectron2's ROIAlign.)
    """
    zero, one = op.CastLike(op.Constant(value_float=0.0), starts), op.CastLike(op.Constant(value_float=1.0), starts)
    half, bins = op.CastLike(op.Constant(value_float=0.5), starts), op.CastLike(op.Constant(value_int=count), starts)
    shifted = op.Equal(op.Constant(value_int=half_pixel), op.Constant(value_int=1))
    ratio = op.CastLike(op.Constant(value_int=sampling_ratio), starts)
    span = op.Where(shifted, ends - starts, op.Max(ends - starts, one))
    wide = op.Unsqueeze(span / bins, op.Constant(value_ints=[1, 2]))
    samples = op.Where(op.Greater(ratio, zero), ratio, op.Ceil(wide))
    share = op.Max(samples, one)
    steps = op.Range(zero, op.ReduceMax(share, keepdims=0), one)
    bin_axis = op.Unsqueeze(op.Range(zero, bins, one), op.Constant(value_ints=[1]))
    at = op.Unsqueeze(starts, op.Constant(value_ints=[1, 2])) + (bin_axis + (steps + half) / share) * wide
    inside = op.And(op.GreaterOrEqual(at, op.Neg(one)), op.LessOrEqual(at, size))
    counted = op.And(inside, op.Less(steps, samples))
    clipped = op.Unsqueeze(op.Max(op.Min(at, size - one), zero), op.Constant(value_ints=[3]))
    weights = op.Max(one - op.Abs(op.Range(zero, size, one) - clipped), zero) / op.Unsqueeze(
        share, op.Constant(value_ints=[3])
    )
    kept = op.Where(op.Unsqueeze(counted, op.Constant(value_ints=[3])), weights, zero)
    return op.ReduceSum(kept, op.Constant(value_ints=[2]), keepdims=0)


@function()
def RoiAlignGrad(
    dy,
    rois,
    images,
    shape,
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    half_pixel: int = 1,
):
    """Gradient of RoiAlign in avg mode: dy back through both axes' matrices, summed into each roi's image.

    ``images`` says which; shape is the operand's.
    """
    half = op.CastLike(op.Constant(value_float=0.5), rois) * op.CastLike(op.Constant(value_int=half_pixel), rois)
    corners = rois * op.CastLike(op.Constant(value_float=spatial_scale), rois) - half
    x0, y0, x1, y1 = op.Split(corners, axis=1, num_outputs=4)
    last = op.Constant(value_ints=[1])
    batch, _, height, width = op.Split(shape, num_outputs=4)
    rows = own.RoiMatrix(
        op.Squeeze(y0, last), op.Squeeze(y1, last), op.CastLike(op.Squeeze(height), rois), count=output_height,
        sampling_ratio=sampling_ratio, half_pixel=half_pixel,
    )  # fmt: skip
    columns = own.RoiMatrix(
        op.Squeeze(x0, last), op.Squeeze(x1, last), op.CastLike(op.Squeeze(width), rois), count=output_width,
        sampling_ratio=sampling_ratio, half_pixel=half_pixel,
    )  # fmt: skip
    down = op.Unsqueeze(op.Transpose(op.CastLike(rows, dy), perm=[0, 2, 1]), last)
    planes = op.MatMul(down, op.MatMul(dy, op.Unsqueeze(op.CastLike(columns, dy), last)))
    flat = op.Reshape(planes, op.Concat(op.Shape(planes, start=0, end=1), op.Constant(value_ints=[-1]), axis=0))
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    every = op.Unsqueeze(op.Range(zero, op.Squeeze(batch), one), last)
    chosen = op.CastLike(op.Equal(every, op.Cast(images, to=7)), dy)
    return op.Reshape(op.MatMul(chosen, flat), shape)
