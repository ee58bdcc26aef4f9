"""Floor 0: what a graph is. Models, nodes and values are onnx_ir's own."""
