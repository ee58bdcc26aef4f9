"""A captured graph bound to live tensors: chosen for the batch, run inside autograd; it knows no ``nn.Module``."""
