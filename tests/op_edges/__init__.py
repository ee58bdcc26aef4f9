"""More rows of the table by family: attributes, element types, kinks and ties."""

from op_edges import elementwise, indexing, layers, movement, reductions

EDGES = [*elementwise.ROWS, *reductions.ROWS, *movement.ROWS, *indexing.ROWS, *layers.ROWS]
