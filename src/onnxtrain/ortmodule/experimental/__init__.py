"""JSON configuration and HierarchicalORTModule, where ``onnxruntime.training.ortmodule.experimental`` had them."""
