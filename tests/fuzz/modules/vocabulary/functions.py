"""Functions that are differentiated and mapped within the forward pass: ``torch.func``, ``autograd.grad``."""

from __future__ import annotations

FAMILIES: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "mapped": (
        "torch.vmap(torch.tanh)({f})", "torch.vmap(lambda row: row * row.sum())({f})",
        "torch.vmap(lambda row: row.softmax(-1), {axis}, {axis})({f})", "torch.vmap(torch.mul)({f}, {s})",
        "torch.vmap(torch.mul, (0, None))({f}, {0}[0])", "torch.vmap(lambda a, b: a @ b, (0, None))({f}, {0}.mT[0])",
        "torch.vmap(lambda row: row.flip(0))({f})", "torch.vmap(lambda row: row[: {n}].cumsum(0))({f})",
        "torch.vmap(torch.vmap(lambda x: x.exp() / (1 + x.exp()).sum()))({f})",
        "torch.vmap(lambda row: (row.amax(), row.amin()))({f2})[0]", "torch.vmap(torch.outer)({f2}, {s})",
        "torch.vmap(lambda row: row.reshape(-1) * {c}, out_dims=-1)({f})", "torch.vmap(lambda a: torch.stack([a, a]))({f})",
        "torch.vmap(lambda row, keep: torch.where(keep, row, {c}))({f}, {0} > 0)", "torch.vmap(torch.linalg.norm)({f2})",
        "torch.vmap(lambda row: torch.cat([row, row * 2]))({f})", "torch.vmap(F.normalize, chunk_size=2)({f3})",
        "torch.vmap(lambda row, at: row[at.abs() % row.shape[0]])({f2}, {0}[:, 0].long())",
        ("torch.vmap(lambda row: F.linear(row, {layer}.weight))({f})", "{layer} = nn.Linear({d}, 3)"),
        ("torch.vmap({layer})({f})", "{layer} = nn.Linear({d}, 2)"),
        ("torch.vmap({layer}, {axis}, {axis})({f3})", "{layer} = nn.LayerNorm({d})"),
    ),
    "differentiated": (
        "torch.func.grad(lambda a: a.pow(3).sum())({f})", "torch.vmap(torch.func.grad(lambda a: a.tanh().sum()))({f})",
        "torch.func.grad_and_value(lambda a: (a * a.sin()).mean())({f})[0]",
        "torch.func.grad(lambda a, b: (a * b.exp()).sum(), argnums=1)({f}, {s})",
        "torch.func.grad(torch.func.grad(lambda a: (a * {c}).sin().sum()))({f}.sum())",
        "torch.func.vjp(torch.sigmoid, {f})[1](torch.ones_like({0}))[0]",
        "{o}, {o2} = torch.func.jvp(torch.tanh, ({f},), ({s},))", "torch.func.jacrev(lambda a: a.sum(-1).sin())({f2})",
        "torch.func.jacfwd(lambda a: a.cos() * {c})({f}.flatten()[:4])", "torch.func.jacrev(torch.exp)({f}[..., 0])",
        "torch.func.hessian(lambda a: a.pow(3).sum() * a.mean())({f}.flatten()[:3])",
        "torch.vmap(torch.func.jacrev(lambda a: a.softmax(-1)))({f2})", "torch.vmap(torch.func.hessian(lambda a: a.sin().prod()))({f2})",
        "torch.func.grad(lambda a: torch.vmap(lambda row: row.logsumexp(-1))(a).sum())({f2})",
        "torch.autograd.functional.jacobian(lambda a: a.pow(2).sum(-1), {f2})",
        "(lambda a: torch.autograd.grad((a**3).sum(), a)[0])({f}.detach().requires_grad_())",
        "{o} = {f} * 1\n{o2} = torch.autograd.grad(({o}.sin() * {0}).sum(), {o}, create_graph=True)[0]",
        ("torch.vmap(torch.func.grad(lambda row: {layer}(row).tanh().sum()))({f})", "{layer} = nn.Linear({d}, 2)"),
        ("torch.func.functional_call({layer}, dict({layer}.named_parameters()), ({f},))", "{layer} = nn.Linear({d}, 2)"),
        (
            "{o} = torch.func.grad(lambda given: torch.func.functional_call({layer}, given, ({f},)).square().mean())("
            "dict({layer}.named_parameters()))['weight']",
            "{layer} = nn.Linear({d}, 2)",
        ),
    ),
}  # fmt: skip
