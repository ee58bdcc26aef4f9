"""Parts of transformers: ``x`` (batch, tokens, 8), ``mask`` that is 1 where a token counts, ``seen`` (batch, 1, …, tokens).

A part is a text of several lines; what it needs in ``__init__`` stands behind it.
"""

from __future__ import annotations

Part = tuple[str, ...]  # lines of forward, lines of __init__

LENGTHS = {
    "right": "mask = (torch.arange(L) < torch.randint(1, L + 1, (B, 1))).long()",
    "left": "mask = (torch.arange(L) >= torch.randint(0, L, (B, 1))).long()",
    "short": "mask = (torch.arange(L) < torch.randint(1, L // 2 + 2, (B, 1))).long()",
    "holes": "mask = ((torch.rand(B, L) < 0.6) | (torch.arange(L) == 0)).long()",
    "full": "mask = torch.ones(B, L, dtype=torch.long)",
}
PLACES: tuple[Part, ...] = (
    ("x = self.words(ids)",),
    ("x = self.words(ids) + self.places(torch.arange(ids.shape[1]))", "self.places = nn.Embedding(32, 8)"),
    ("x = self.words(ids) + self.places.weight[: ids.shape[1]]", "self.places = nn.Embedding(32, 8)"),
    ("x = self.words(ids) + self.places((mask.cumsum(1) * mask).clamp(max=31))", "self.places = nn.Embedding(32, 8)"),
    ("x = self.words(ids) * 8**0.5 + self.table[:, : ids.shape[1]]", "self.register_buffer('table', torch.randn(1, 32, 8))"),
    ("x = self.norm(self.words(ids) + self.kinds(mask))", "self.kinds = nn.Embedding(2, 8)", "self.norm = nn.LayerNorm(8)"),
    ("x = F.dropout(self.words(ids), 0.0) * mask[..., None]",),
)  # fmt: skip
SEEN: tuple[Part, ...] = (
    ("seen = mask[:, None, None, :].bool()",),
    ("seen = mask[:, None, None] != 0",),
    ("seen = (mask > 0).unsqueeze(1).unsqueeze(2)",),
    ("seen = (mask[:, None, :, None] * mask[:, None, None, :]).bool()",),
    ("seen = mask[:, None, None, :].bool() & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()",),
    ("place = torch.arange(ids.shape[1])\nseen = (place[None] <= place[:, None]) & mask.bool()[:, None, None]",),
    ("place = torch.arange(ids.shape[1])\nseen = ((place[None] - place[:, None]).abs() <= 1) & mask.bool()[:, None, None]",),
    ("seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]",),
    ("seen = (ids != 0)[:, None, None]",),
    ("seen = (torch.arange(ids.shape[1]) < mask.sum(1, keepdim=True))[:, None, None]",),
    ("part = mask.cumsum(1) // 3\nseen = (part[:, :, None] == part[:, None])[:, None] & mask.bool()[:, None, None]",),
    ("seen = mask[:, None, None, :].expand(-1, 1, ids.shape[1], -1) == 1",),
    ("seen = (mask[:, None, None] * torch.ones(ids.shape[1], ids.shape[1]).tril()).bool()",),
    ("seen = torch.stack((mask, torch.ones_like(mask)), 1)[:, :, None].bool()",),
)  # fmt: skip
HEADS: tuple[Part, ...] = (
    ("q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))",),
    ("q, k, v = layer['three'](x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)",),
    ("q, k, v = layer['three'](x).view(x.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)",),
    ("q, k, v = (t.reshape(t.shape[0], t.shape[1], 2, -1).permute(0, 2, 1, 3) for t in layer['three'](x).split(8, -1))",),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "k, v = (t[:, :1].expand(-1, 2, -1, -1) for t in (k, v))",
    ),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "turn = torch.arange(x.shape[1], dtype=REAL)[:, None] * torch.tensor([1.0, 0.1], dtype=REAL)\n"
        "turn = torch.cat((turn, turn), -1)\n"
        "q, k = (t * turn.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * turn.sin() for t in (q, k))",
    ),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)",
    ),
    ("k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1)[:2])\nq = k.flip(1)",),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "k, v = k[:, :1], v[:, 1:]",
    ),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "q = q.mean(0, keepdim=True)",
    ),
    (
        "q, k, v = (t.view(*t.shape[:2], 2, 4).transpose(1, 2) for t in layer['three'](x).chunk(3, -1))\n"
        "k, v = k[-1:], v[-1:]",
    ),
)  # fmt: skip
SCORES: tuple[Part, ...] = (
    ("scores = q @ k.mT * 0.5",),
    ("scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])",),
    ("scores = torch.einsum('bhid,bhjd->bhij', q, k) * 0.5",),
    ("scores = (q * 0.5) @ k.transpose(2, 3)",),
    ("place = torch.arange(x.shape[1])\nscores = q @ k.mT * 0.5 - 0.1 * (place[:, None] - place).abs()",),
    (
        "place = torch.arange(x.shape[1])\n"
        "scores = q @ k.mT * 0.5 + self.distance((place - place[:, None]).clamp(-3, 3) + 3).permute(2, 0, 1)",
        "self.distance = nn.Embedding(7, 2)",
    ),
    ("scores = (q @ k.mT * 0.5).tanh() * 5",),
    ("scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(x.shape[0], 2, x.shape[1], x.shape[1]) * 0.5",),
)  # fmt: skip
HIDDEN: tuple[Part, ...] = (
    ("weights = scores.masked_fill(~seen, float('-inf')).softmax(-1)",),
    ("weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)",),
    ("weights = scores.masked_fill(~seen, -1e9).softmax(dim=-1)",),
    ("weights = (scores + (~seen).to(scores.dtype) * -1e4).softmax(-1)",),
    ("weights = (scores + (1.0 - seen.to(scores.dtype)) * torch.finfo(scores.dtype).min).softmax(-1)",),
    ("weights = torch.where(seen, scores, -1e9).softmax(-1)",),
    ("weights = torch.where(seen, scores, torch.finfo(REAL).min).softmax(-1, dtype=torch.float32).to(REAL)",),
    ("weights = scores.masked_fill(~seen, -1e9).softmax(-1).masked_fill(~seen, 0.0)",),
    ("weights = F.dropout(scores.masked_fill(~seen, -1e9).softmax(-1), 0.0, self.training)",),
    ("weights = (scores - 3.0 * (~seen).to(REAL)).softmax(-1)",),
    ("weights = scores.softmax(-1) * seen",),
    ("weights = scores.exp() * seen\nweights = weights / weights.sum(-1, keepdim=True).clamp(1e-9)",),
    ("scores = scores.masked_fill(~seen, -1e9)\nweights = (scores - scores.amax(-1, keepdim=True)).exp()\nweights = weights / weights.sum(-1, keepdim=True)",),
    ("weights = scores.masked_fill(~seen, -1e9).log_softmax(-1).exp()",),
    ("hidden = torch.zeros(seen.shape, dtype=REAL).masked_fill(~seen, -1e9)\nweights = (scores + hidden).softmax(-1)",),
    ("hidden = torch.zeros(seen.shape, dtype=REAL)\nhidden[~seen] = float('-inf')\nweights = (scores + hidden).softmax(-1)",),
    ("weights = scores.sigmoid() * seen / scores.shape[-1]",),
    ("weights = F.relu(scores).masked_fill(~seen, 0)",),
)  # fmt: skip
KERNELS: tuple[Part, ...] = (
    ("mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)",),
    ("mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(seen, 0.0, -1e9).to(REAL))",),
    ("mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(seen.shape, dtype=REAL).masked_fill(~seen, torch.finfo(REAL).min))",),
    ("mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)",),
    ("mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.7)",),
    ("mixed = F.scaled_dot_product_attention(q, k, v, seen.expand(-1, 2, x.shape[1], -1))",),
)  # fmt: skip
TOGETHER: tuple[Part, ...] = (
    ("x = x + layer['out'](mixed.transpose(1, 2).flatten(2))",),
    ("x = layer['first'](x + layer['out'](mixed.transpose(1, 2).reshape(x.shape)))",),
    ("x = x + layer['out'](layer['first'](mixed.permute(0, 2, 1, 3).contiguous().view(*x.shape)))",),
    ("x = torch.add(x, layer['out'](torch.cat(mixed.unbind(1), -1)))",),
)  # fmt: skip
WHOLE: tuple[Part, ...] = (
    (
        "x = self.encoder(x, src_key_padding_mask=mask == 0)",
        "self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 2, enable_nested_tensor=False)",
    ),
    ("x = x + self.attend(x, x, x, key_padding_mask=mask == 0)[0]", "self.attend = nn.MultiheadAttention(8, 2, batch_first=True)"),
    ("x = x + self.attend(x, x, x, key_padding_mask=~mask.bool(), need_weights=False)[0]", "self.attend = nn.MultiheadAttention(8, 2, batch_first=True)"),
)  # fmt: skip
FORWARD: tuple[Part, ...] = (
    ("x = x + layer['narrow'](F.gelu(layer['wide'](x)))",),
    ("x = layer['second'](x + layer['narrow'](layer['wide'](x).relu()))",),
    ("x = x + layer['narrow'](F.silu(layer['wide'](layer['second'](x))) * layer['wide'](x))",),
    ("h = layer['second'](x)\nx = x + layer['narrow'](F.gelu(layer['wide'](h), approximate='tanh'))",),
    ("gate = layer['gate'](x).softmax(-1)\nx = x + sum(gate[..., i, None] * part for i, part in enumerate((x.tanh(), layer['second'](x))))",),
    ("x = x + layer['narrow'](layer['wide'](x.view(-1, 8)).square()).view(x.shape)",),
    ("x = (x + layer['narrow'](F.gelu(layer['wide'](x)))) * mask[..., None].to(REAL)",),
    ("x = x.masked_fill((mask == 0)[..., None], 0.0)\nx = x + layer['narrow'](layer['wide'](x).relu())",),
)  # fmt: skip
MIXING: tuple[Part, ...] = (
    ("x = self.mix(x.transpose(1, 2)).transpose(1, 2)", "self.mix = nn.Conv1d(8, 8, 3, padding=1)"),
    ("x = self.mix((x * mask[..., None]).mT).mT", "self.mix = nn.Conv1d(8, 8, 3, padding=1)"),
    ("x = x + x.mean(1, keepdim=True)",),
    ("x = x.cumsum(1) / 4",),
    ("x = x + 0.5 * x.roll(1, 1)",),
    ("x = x.flip(1)",),
    ("x = self.mix(x)[0]", "self.mix = nn.GRU(8, 8, batch_first=True)"),
    ("x = self.mix(x.mT).mT", "self.mix = nn.BatchNorm1d(8)"),
    ("x = torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), 1)[:, 2:]", "self.prefix = nn.Parameter(torch.randn(1, 2, 8))"),
    ("x = torch.cat((x[:, :1] * 2, x[:, 1:]), 1)",),
    ("x = F.pad(x, (0, 0, 1, 0))[:, :-1] + x",),
    ("y = x.clone()\ny[:, 0] = 0\nx = x + y",),
    ("x = x * (x.std((1, 2), keepdim=True) + 1)",),
    ("x = x + x.softmax(1) * 0.5",),
    ("x = x + (x.sort(1).values - x) * 0.1",),
    ("x = x[torch.arange(x.shape[0]).flip(0)]",),
)  # fmt: skip
LOGITS: tuple[Part, ...] = (
    ("logits = self.head(x)", "self.head = nn.Linear(8, 20)"),
    ("logits = self.head(self.last(x))", "self.head = nn.Linear(8, 20, bias=False)", "self.last = nn.LayerNorm(8)"),
    ("logits = F.linear(x, self.words.weight)",),
    ("logits = x @ self.words.weight.t() + self.bias", "self.bias = nn.Parameter(torch.zeros(20))"),
    ("logits = self.head(x)", "self.head = nn.Linear(8, 20, bias=False)", "self.head.weight = self.words.weight"),
)  # fmt: skip
TOKEN_LOSSES: tuple[Part, ...] = (
    ("loss = F.cross_entropy(logits.view(-1, 20), labels.view(-1))",),
    ("loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')",),
    ("loss = F.cross_entropy(logits.transpose(1, 2), labels)",),
    ("loss = F.cross_entropy(logits.reshape(-1, 20), labels.reshape(-1), label_smoothing=0.1)",),
    ("loss = F.nll_loss(logits.log_softmax(-1).mT, labels)",),
    ("each = F.cross_entropy(logits.view(-1, 20), labels.view(-1), reduction='none')\nloss = each.sum() / (labels != -100).sum()",),
    ("each = F.cross_entropy(logits.mT, labels.clamp(0), reduction='none')\nloss = (each * mask).sum() / mask.sum()",),
    ("each = F.cross_entropy(logits.mT, labels, reduction='none')\nloss = (each.sum(1) / (labels != -100).sum(1).clamp(1)).mean()",),
    ("chosen = labels != -100\nloss = F.cross_entropy(logits[chosen], labels[chosen])",),
    ("likely = logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None]).squeeze(-1)\nloss = -(likely * (labels != -100)).sum()",),
    ("likely = logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None])[..., 0]\nloss = -likely.masked_fill(labels == -100, 0).mean()",),
    ("loss = F.mse_loss(logits[..., 0] * mask, ids.to(REAL) * mask)",),
    ("loss = ((logits[..., 0] - ids).square() * mask).sum() / mask.sum()",),
    ("loss = F.binary_cross_entropy_with_logits(logits[..., 1], mask.to(REAL), weight=mask.to(REAL))",),
    ("loss = F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1), reduction='none').sum(-1).mul(mask).sum()",),
    ("loss = F.cross_entropy(logits.view(-1, 20), labels.view(-1)) + 1e-3 * (logits.logsumexp(-1) * mask).square().sum()",),
    ("loss = F.cross_entropy(logits.view(-1, 20), labels.view(-1)) + F.cross_entropy(x.mean(1), ids[:, 0] % 8)",),
    ("loss = F.cross_entropy(logits.view(-1, 20), labels.view(-1), ignore_index=int(-100), weight=self.words.weight.detach().sum(1).sigmoid())",),
    ("loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction='sum')",),
    ("shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]\nloss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction='sum')",),
    ("loss = F.cross_entropy(logits.view(-1, 20), labels.view(-1)) + x.square().mean()",),
)  # fmt: skip
POOLED: tuple[Part, ...] = (
    ("pooled = x[:, 0]",),
    ("pooled = x[:, -1]",),
    ("pooled = x.mean(1)",),
    ("pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)",),
    ("pooled = (x * mask[..., None].to(REAL)).sum(1) / mask[..., None].sum(1).clamp(1e-9)",),
    ("pooled = torch.einsum('bl,bld->bd', mask.to(REAL), x) / mask.sum(1, keepdim=True)",),
    ("pooled = x.masked_fill((mask == 0)[..., None], -1e9).amax(1)",),
    ("pooled = x.masked_fill(mask[..., None] == 0, float('-inf')).max(1).values",),
    ("pooled = x[torch.arange(x.shape[0]), mask.cumsum(1).argmax(1)]",),
    ("pooled = x.gather(1, mask.cumsum(1).argmax(1)[:, None, None].expand(-1, 1, 8)).squeeze(1)",),
    ("focus = self.focus(x).squeeze(-1).masked_fill(mask == 0, -1e9).softmax(1)\npooled = (x * focus[..., None]).sum(1)", "self.focus = nn.Linear(8, 1)"),
    ("pooled = x[:, :2].mean(1)",),
    ("pooled = self.pool(x[:, 0]).tanh()", "self.pool = nn.Linear(8, 8)"),
    ("pooled = torch.cat((x[:, 0], (x * mask[..., None]).sum(1)), -1)[:, ::2]",),
    ("pooled = x[mask.bool()].mean(0, keepdim=True).expand(x.shape[0], -1)",),
    ("pooled = (mask[:, None].to(REAL) @ x).squeeze(1) / 4",),
    ("pooled = x.sum(1) - (x * (1 - mask[..., None])).sum(1)",),
)  # fmt: skip
POOLED_LOSSES: tuple[Part, ...] = (
    ("loss = F.cross_entropy(self.classes(pooled), ids[:, 0] % 3)", "self.classes = nn.Linear(8, 3)"),
    ("loss = F.mse_loss(self.classes(pooled).squeeze(-1), ids[:, 0].to(REAL) / 20)", "self.classes = nn.Linear(8, 1)"),
    ("y = F.normalize(pooled, dim=-1)\nloss = F.cross_entropy(y @ y.t() * 5, torch.arange(y.shape[0]))",),
    ("loss = F.binary_cross_entropy_with_logits(self.classes(pooled), (ids[:, :1] % 2).to(REAL).expand(-1, 3))", "self.classes = nn.Linear(8, 3)"),
    ("loss = pooled.square().sum()",),
    ("loss = -F.logsigmoid(self.classes(pooled) - self.classes(pooled.roll(1, 0))).mean()", "self.classes = nn.Linear(8, 1)"),
    ("loss = F.cross_entropy(self.classes(pooled), ids[:, 0] % 3) + 0.1 * F.cross_entropy((x @ self.words.weight.t()).mT, labels)", "self.classes = nn.Linear(8, 3)"),
)  # fmt: skip
CROSSED: tuple[Part, ...] = (
    ("y = self.words(labels.clamp(0))\nx = F.scaled_dot_product_attention(y, x, x, mask[:, None].bool())",),
    ("y = self.words(labels.clamp(0))\nweights = (y @ x.mT).masked_fill(mask[:, None] == 0, -1e9).softmax(-1)\nx = y + weights @ x",),
)  # fmt: skip
RETURNS = (
    "loss",
    "loss",
    "loss",
    "(loss,)",
    "{'loss': loss}",
    "(loss, x.detach().sum())",
    "{'loss': loss, 'hidden': x}",
    "(loss, mask.sum())",
)
