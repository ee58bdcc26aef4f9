"""Our operators for the gradients of resizing, of whole images and of regions."""

from __future__ import annotations

from onnxtrain.ir.functions import function, op, own


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
