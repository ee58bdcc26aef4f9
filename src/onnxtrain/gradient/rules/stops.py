"""Operators through which no gradient flows: results that are integers, bools or shapes, constant by pieces, or random."""

NOT_DIFFERENTIABLE = frozenset(
    """
    ArgMax ArgMin And Or Not Xor BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less
    LessOrEqual IsInf IsNaN NonZero Shape Size Range Constant ConstantOfShape EyeLike Floor Ceil Round Sign OneHot Hardmax
    Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike
    QuantizeLinear DynamicQuantizeLinear StringNormalizer TfIdfVectorizer Unique
    onnxtrain::Detach
    """.split()
)
