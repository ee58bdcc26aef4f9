"""Parts of stacks of layers: ``x`` (batch, length, 4), the keeper ``c``, ``m`` like ``x`` and ``s``, a number.

A layer has ``self.i``, its number; ``self.n`` is how many there are, in the module. Texts have ``{j}``, the number of a
layer, ``{k}``, a small number, and ``{n}``, how many layers there are.
"""

from __future__ import annotations

KEEPER = """\
class Keeper:
    def __init__(self):
        self.kept, self.listed, self.total = {}, [], 0.0
"""
KEEPERS = {
    "what it is given": "self.kept[layer_idx] = (k, v)\nreturn k, v",
    "behind what was": "k, v = (torch.cat([t[:, :0], t], 1) for t in (k, v))\nself.kept[layer_idx] = (k, v)\nreturn k, v",
    "with the one before": "self.kept[layer_idx] = (k, v)\nreturn k + self.kept.get(layer_idx - 1, (k, v))[0], v",
    "of one before": "self.kept[layer_idx] = (k, v)\nreturn self.kept[max(0, layer_idx - {k})]",
    "by its number": "self.kept[layer_idx] = (k, v)\nself.total += layer_idx\nreturn (k * 1.5 if layer_idx % 3 == {k} % 3 else k), v",
    "a part": "self.kept[layer_idx] = (k[:, :2], v.detach())\nself.listed.append(v)\nreturn k, v",
    "not of one": "if layer_idx != {j}:\n    self.kept[layer_idx] = (k, v)\nreturn k, v",
    "in a list": "self.listed.append(k * 2)\nself.kept[layer_idx] = (k, v)\nreturn k, v",
    "for all": "self.kept[layer_idx] = (k, v)\nself.kept[0] = (self.kept[0][0] + k, v)\nreturn k, v",
    "in place": "self.kept[layer_idx] = (k.clone(), v)\nself.kept[layer_idx][0].mul_(0.5)\nreturn self.kept[layer_idx]",
    "a number": "self.kept[layer_idx] = (k, v)\nself.total += k.shape[1]\nreturn k, v * self.total",
}  # fmt: skip
HANDED = (
    "k, v = c.update(k, v, self.i)",
    "k, v = c.update(k, v, layer_idx=self.i)",
    "c.update(k, v, self.i)",
    "k2, v = c.update(k, v, self.i)\nk = k + k2",
    "k, v = c.update(v, k, self.i)",
    "if c is not None:\n    k, v = c.update(k, v, self.i)",
    "w, u = c.update(k, v, self.i)\nv = v + 0.1 * w * u",
)
KEYS = (
    "k = self.a(x)", "k = self.a(x)", "k = x * 2", "k = x", "k = self.a(x).view(x.shape[0], -1, 4)",
    "k = self.a(x.detach())", "k = torch.tanh(self.a(x))", "k = x.transpose(1, 2).transpose(1, 2)",
    "k = self.a.weight.sum() + x", "k = F.linear(x, self.a.weight)", "k = self.norm(x)", "k = self.drop(self.a(x))",
    "k = self.a(self.norm(x))", "k = x @ self.a.weight.t() + self.a.bias", "k = self.seq(x)", "k = self.a(x).flatten(0, 1).view(x.shape)",
)  # fmt: skip
VALUES = (
    "v = self.b(x)", "v = self.b(x)", "v = x", "v = k", "v = k * s", "v = self.b(x) * m", "v = x + s", "v = self.b(k)",
    "v = self.b(x).relu()", "v = (k @ k.transpose(1, 2)).softmax(-1) @ self.b(x)",
    "v = F.scaled_dot_product_attention(k, self.b(x), x)", "v = (k @ x.transpose(1, 2)) @ self.b(x)",
    "v = F.scaled_dot_product_attention(k, k, self.b(x), is_causal=True)", "v = self.conv(k.transpose(1, 2)).transpose(1, 2)",
    "k, v = torch.cat((k, x), -1).chunk(2, -1)", "v = F.gelu(self.b(x), approximate='tanh')", "v = self.seq(k)",
)  # fmt: skip
THEN = (
    "v = v * m", "k = torch.relu(k)", "v = v - v.mean(1, keepdim=True)", "k = k.clone()\nk[:1] = 0",
    "v = v.detach() * self.s + v", "k = k * self.s", "v = v + self.buf", "x = x * 1", "v = v.clone().mul_(0.5)",
    "k = k.softmax(-1)", "with torch.no_grad():\n    u = v * 0.2\nv = v + u", "v = torch.where(v > 0, v, k)",
    "v = v + torch.arange(x.shape[1], dtype=x.dtype)[:, None]", "v = v.masked_fill(m < 0.5, 0.0)", "k, v = v, k",
    "v = v / math.sqrt(x.shape[1])", "v = v + torch.ones(x.shape[1], 1).tril().to(x.dtype)", "v = self.norm(v)",
    "if self.training:\n    v = v * 0.5", "v = v * self.gain", "k = k + self.gain", "x = self.norm(x)", "v = F.dropout(v, 0.0)",
    "v = v.roll(1, 1)", "v = v.flip(1)", "v = v + v[:, :1]", "k = k.to(torch.float32).to(x.dtype)", "v = v[..., [1, 0, 3, 2]]",
    "for part in (k, v):\n    x = x + 0.1 * part", "v = sum(t for t in v.unbind(-1))[..., None] + k", "x = x.clone()\nx += 0.1 * v",
    "v = v * v.new_ones(4)", "assert v.shape[-1] == 4", "v = v.cumsum(1) / (v.shape[1] + 1)", "v = v * (v.detach() > 0)",
    "u = k if k.shape[0] == v.shape[0] else v\nv = v + u",
)  # fmt: skip
NUMBERS = (
    "v = v * (self.i + 1)", "v = v * (2 if self.i == {j} else 1)", "v = v * float(self.i)", "v = v if self.i % 2 else v * 2",
    "v = v + len(str(self.i))", "v = v * [1.0, 2.0][self.i == 0]", "v = v * self.rate", "v = v if self.rate > 0.2 else v * 2",
    "self.calls = getattr(self, 'calls', 0) + 1", "self.last = v.detach()", "self.seen = v", "self.buf2 = self.buf * 2\nv = v + self.buf2",
    "self.count += 1", "v = v + self.count", "self.count.add_(v.detach().mean())", "TOTAL.append(1)",
    "v = self.batch(v.transpose(1, 2)).transpose(1, 2)",
)  # fmt: skip
LOOKS = (
    "v = v * (1 + len(c.kept))", "v = v + c.kept[0][0].mean()", "c.extra = v", "v = v if isinstance(c, Keeper) else v * 3",
    "v = v * (2 if c.total else 1)", "c.listed.append(k)", "c.kept[self.i] = (c.kept[self.i][0] * 2, v)",
)  # fmt: skip
RESULTS = (
    "x + 0.1 * k * v", "x + v", "(x + v) * 0.5", "x + self.o(k * v)", "(x + k + v).view(x.shape) * 0.4", "torch.where(x > 0, x + v, k)",
    "x + v", "x.add(v)", "self.norm(x + v)", "x + self.o(v).tanh() + 0.0 * k", "x * 0.5 + v.clamp(-2, 2)",
    "F.layer_norm(x + v, (4,))", "x + self.o(F.silu(self.a(x)) * v)", "v", "x + v.mean(1, keepdim=True)",
)  # fmt: skip
LOOPS = (
    "if j == {j}:\n    x = x * 2", "if first is None:\n    first = x", "seen.append(x)", "x = x * 1.0",
    "if j == {j}:\n    first = x", "x = x + s", "e = e * 2", "m = m * 0.9", "if j == {j}:\n    x = x.detach()", "x = x.clone()",
    "seen.append(e)", "if j > {j}:\n    x = x.mul_(1.1)", "seen = [x]", "x = x + self.shared(x)", "x = x + self.first.bias",
    "if j == {j}:\n    break", "if j == {j}:\n    continue", "x = x + (seen.pop() if seen else 0)", "s = s + x.mean()",
    "if j % 2:\n    seen.append(x)", "x = x + 0.1 * first if first is not None else x", "x = self.norms[j](x)",
)  # fmt: skip
ORDERS = (
    "self.layers", "self.layers", "self.layers", "self.layers", "self.layers[:-1]", "reversed(self.layers)",
    "self.layers[1:]", "self.layers[::2]", "[*self.layers, *self.layers]", "self.layers[: {j} + 1]", "list(self.layers)",
    "(self.layers[i] for i in range(self.n))", "[self.layers[0]] * {n}",
)  # fmt: skip
CALLS = (
    "layer(x, c, m, s)", "layer(x, c, m, s)", "layer(x, c=c, m=m, s=s)", "layer(x, s=s, m=m, c=c)", "layer.forward(x, c, m, s)",
    "layer(x, c, m, x.mean())", "layer(x, c, m, x.detach().mean())", "checkpoint(layer, x, c, m, s, use_reentrant=False)",
    "layer(x, c, m if j else m * 1, s)", "layer(x, c, m.clone(), s)", "layer(x * 1, c, m, s)",
)  # fmt: skip
_ALIKE = "self.layers = nn.ModuleList(Layer({number}) for i in range({n}))"
_MADE_UNLIKE = (
    "self.layers[{j}].a = self.layers[{k} - 1].a",
    "self.layers[{j}].requires_grad_(False)",
    "self.layers[:{j}].requires_grad_(False)",
    "self.layers[{j}].eval()",
    "self.layers[{j}].register_forward_hook(lambda m, a, r: r)",
    "self.layers[{j}].s = 0.25",
    "self.layers[{j}].buf.fill_(0.7)",
    "self.layers[{j}].a.bias = None",
    "self.layers[{j}].a = nn.Linear(4, 4, bias=False)",
    "self.layers[{j}] = nn.Sequential(Layer(0))[0]",
)  # fmt: skip
HELD = (
    _ALIKE,
    "self.layers = nn.ModuleList([Layer({number}) for i in range({n})])",
    *(f"{_ALIKE}\n{change}" for change in _MADE_UNLIKE),
    "self.layers = nn.ModuleList([Layer(0)] * {n})",
    "self.layers = nn.ModuleList(Layer({number}) if i != {j} else Other({number}) for i in range({n}))",
)  # fmt: skip
JOINS = (
    "x = x + z", "x = x * z", "x = (x - z).tanh()", "x = x + z.relu()", "x = self.norms[0](x) + z", "x = x + self.norms[1](z)",
    "x = torch.cat([x, z], 1)", "x = torch.where(z > 0, x, z)", "x = x + z.mean(1, keepdim=True)", "x, z = z, x",
    "x = x + z.detach()", "e = z", "x = self.norms[0](x + z)", "x = z - x * s", "x = self.norms[0](x) + self.norms[1](z)",
    "x = self.norms[0](x) + self.norms[1](z).relu()", "x = self.shared(self.norms[0](x)) + self.shared(self.norms[1](z))",
    "x = self.shared(self.norms[0](x)) - self.norms[1](z) * 2", "x = self.norms[0](x) + self.shared(self.norms[1](z)).tanh()",
)  # fmt: skip
FURTHER = (
    "e", "first if first is not None else x * 1", "sum(seen) if seen else x * 1", "x", "seen", "m", "s", "x[:, -1]",
)  # fmt: skip
OF_KEEPERS = (
    "{{str(key): value for key, value in c.kept.items()}}", "{{str(key): value for key, value in c.kept.items()}}",
    "sum(pair[0].sum() for pair in c.kept.values())", "[value for value in c.listed]", "c.total", "len(c.kept)",
    "torch.stack([pair[0] for pair in c.kept.values()])", "next(iter(c.kept.values()))[1]", "[*c.kept.values()][-1]",
)  # fmt: skip
LAYER = """\
class Layer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
        self.s = {scale}
        self.rate = {rate}
        self.a, self.b, self.o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.0)
        self.seq = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.batch = nn.BatchNorm1d(4)
        self.gain = nn.Parameter(torch.ones(4) * 0.5)
        self.register_buffer("buf", torch.full((4,), {buffer}))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, c, m, s):
"""
OTHER = "class Other(Layer):\n    pass\n"
