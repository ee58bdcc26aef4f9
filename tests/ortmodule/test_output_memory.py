"""Whose memory outputs lie in: their own, unless eager PyTorch gives a view."""

import pytest
import torch
from parity import Calls, captures

from onnxtrain import Options, ORTModule

BACKENDS = ("torch", "onnxruntime", "reference")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


NEW = {
    "clone": lambda x: (x.clone(), x.clone(), x.clone()[0], x.t().clone()),
    "value_and_copy": lambda x: (lambda h: (h, h.clone()))(x.abs()),
    "constants": lambda x: (torch.zeros(3), torch.zeros(3), torch.full((3,), 2.0), torch.tensor([1.0, 2.0])),
    "expanded": lambda x: (x[:1].expand(4, 4).contiguous(), x.sum().expand(3, 3).contiguous(), x.repeat(1, 1)),
    "parts": lambda x: (x.index_select(0, torch.arange(4)), torch.cat([x]), torch.stack([x]), x[torch.tensor([0, 1])]),
    "copy_of_same_type": lambda x: (x.to(torch.float32, copy=True), x.t().contiguous(), x.t().reshape(16)),
    "nothing_to_do": lambda x: (x + 0, x * 1, x.relu(), x.clamp(-1e9, 1e9), x.tril(10), x.roll(0), x[:1].sum(0)),
    "known_numbers": lambda x: (x.sum().max(0)[1], x * 2),
    "known_numbers_twice": lambda x: (lambda v: (v.cumsum(0), v, v.clone(), x * 2))(x.sum().max(0)[1]),
    "a copy of windows": lambda x: (x.unfold(-1, 2, 1).contiguous(), x.unfold(-1, 2, 1) * 1, x.unfold(-1, 2, 1) * 1),
    "split_copy": lambda x: x.clone().unbind(0),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NEW)
def test_what_eager_makes_anew_lies_in_memory_of_its_own(name, backend):
    """Whoever writes to an output changes neither the input, nor another output, nor what the next call returns."""
    model, x = ORTModule(Calls(NEW[name]), Options(backend=backend)), torch.rand(4, 4)
    want, given = [y.clone() for y in NEW[name](x)], x.clone()
    for _ in range(2):
        made = model(x)
        for index, (y, wanted) in enumerate(zip(made, want, strict=True)):
            assert torch.allclose(y, wanted), index
            y.fill_(7.0)
        assert torch.equal(x, given)


@pytest.mark.parametrize("trained", [False, True])
def test_views_stay_views(trained):
    """A part of an input is a part of it still; parts of one new tensor are parts of one."""
    model = ORTModule(Calls(lambda x: (x.view(-1), x[0], x.abs(), x.detach())), Options())
    x = torch.rand(4, 4, requires_grad=trained)
    flat, first, new, detached = model(x)
    assert _memory(flat) == _memory(first) == _memory(detached) == _memory(x) != _memory(new)


def test_a_copy_of_windows_is_not_the_windows():
    """Which lie in the input's memory in eager PyTorch, and in their own here."""
    copy, windows = ORTModule(Calls(lambda x: (lambda w: (w.contiguous(), w))(x.unfold(-1, 2, 1))))(torch.rand(4, 4))
    assert _memory(copy) != _memory(windows)


def test_a_copy_before_a_write_after_a_graph_break():
    """What was copied is what it was, though the tensor changes in the next piece."""

    def step(memory):
        old = memory.clone()
        torch._dynamo.graph_break()
        memory.add_(1.0)
        return memory - old

    assert torch.allclose(torch.compile(step, backend="onnxtrain")(torch.rand(3)), torch.ones(3))


def test_the_cache_knows_views(tmp_path):
    """A recalled graph has the memory that a traced one has."""
    for _ in range(2):
        model = ORTModule(Calls(lambda x: (x.clone(), x.view(-1))), Options(cache_dir=tmp_path))
        x = torch.rand(2, 2)
        copy, view = model(x)
        assert _memory(view) == _memory(x) != _memory(copy)


def test_what_eager_expands_is_not_written_out():
    """A result that is expanded keeps its small memory."""
    model = ORTModule(Calls(lambda x: (x.abs()[:1].expand(4, 4), x.abs().expand(2, 4, 4).contiguous())))
    expanded, whole = model(torch.rand(4, 4))
    assert expanded.stride() == (0, 1) and whole.stride() == (16, 4, 1)


IN_ORDER = {
    "moved": lambda x: (x * 2).transpose(0, 1).contiguous(),
    "computed in another order": lambda x: ((x * 2).transpose(0, 1) + 1).contiguous(),
    "a clone": lambda x: (x * 2).permute(2, 0, 1).clone(memory_format=torch.contiguous_format),
    "of the input": lambda x: x.transpose(0, 1).contiguous(),
    "the input": lambda x: x.contiguous(),
    "reshaped": lambda x: (x * 2).transpose(0, 1).reshape(-1, 5),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_who_asked_for_order_may_look_at_it_in_another_shape(name):
    """``view`` of what is returned raises where its elements lie in another order."""
    for wrapped in (ORTModule(Calls(IN_ORDER[name])), torch.compile(IN_ORDER[name], backend="onnxtrain")):
        for x in (torch.rand(3, 4, 5), torch.rand(4, 3, 5).transpose(0, 1), torch.rand(2, 4, 5)[:, :3]):
            assert torch.equal(wrapped(x).view(-1), IN_ORDER[name](x).view(-1))


CHOSEN = {
    "by a mask after an axis": lambda x, mask: x[:, mask],
    "by a mask at the end": lambda x, mask: x.mT[..., mask],
    "of a part": lambda x, mask: x[:2, mask],
    "beside a new axis": lambda x, mask: x[:, None, mask],
    "by the places of a mask": lambda x, mask: x.index_select(1, mask.nonzero()[:, 0]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_mask_chooses_lies_in_order(name):
    """How much that is, and whether there is any, only the content tells."""
    model = ORTModule(Calls(CHOSEN[name]))
    for chosen in (3, 0, 1):
        x, mask = torch.rand(3, 4, 5), torch.arange(4) < chosen
        made, wanted = model(x, mask), CHOSEN[name](x, mask)
        assert torch.equal(made, wanted) and made.is_contiguous() and wanted.is_contiguous()


TOGETHER = {
    "a part and the whole": lambda x: (lambda h: (h[:, 0:1], h))((x * 2).transpose(0, 1).contiguous()),
    "the whole and two parts": lambda x: (lambda h: (h, h[0], h[1]))((x * 2).transpose(0, 1).contiguous()),
    "parts alone": lambda x: (lambda h: (h[0], h[1:]))((x * 2).transpose(1, 2).contiguous()),
    "of the input": lambda x: (lambda h: (h[:, 1:], h, h[0, 1:]))(x.transpose(0, 1).contiguous()),
    "beside what it is a copy of": lambda x: (lambda h, c: (c[0], h, c))(
        *(lambda h: (h, h.mT.contiguous()))(x * 2),
    ),
    "of an input that was written to": lambda x: (lambda v, _: (v, v[1:]))(x.mT, x.diagonal().fill_(0.5)),
    "turned again": lambda x: (lambda h: (h, h.transpose(0, 1)))((x * 2).transpose(0, 1).contiguous()),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_outputs_of_one_memory_are_put_in_order_together(name):
    """The strides are eager PyTorch's, and so is who shares memory with whom."""
    model = ORTModule(Calls(TOGETHER[name]))
    for x in (torch.rand(3, 4, 5), torch.rand(6, 2, 3)):
        made, wanted = model(x), TOGETHER[name](x)
        assert [y.stride() for y in made] == [y.stride() for y in wanted]
        assert [[_memory(a) == _memory(b) for b in made] for a in made] == [
            [_memory(a) == _memory(b) for b in wanted] for a in wanted
        ]


class Counting(torch.nn.Module):
    """Returns its input; a number that it counts chooses a path, of which each variant of the graph is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.count = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count[0] += x.shape[0]
        if self.count[0] % 2:
            x * 2
        return x


def test_a_random_number_that_is_looked_at_is_an_output():
    """It is made of nothing, and its lowering may give what others have."""
    model, x = ORTModule(Calls(lambda x: x if torch.rand(()).item() < 2 else x * 2)), torch.rand(3, 4)
    assert all(torch.equal(model(x), x) for _ in range(2))


def test_an_input_is_given_back_by_every_path():
    model, x = ORTModule(Counting()), torch.rand(3, 4)
    assert all(torch.equal(model(x), x) for _ in range(4))


FOLLOWED = {
    "computed": lambda x: x * 2,
    "made in order": lambda x: torch.zeros(x.shape) + x,
    "a part of a copy": lambda x: x.tile(1, 1, 1)[:, 1:3],
    "a part": lambda x: x[:, 1:3],
    "a copy": lambda x: x.clone(),
    "an element of each": lambda x: x[..., 0] * x[..., 1],
    "made in order of elements": lambda x: torch.zeros(x.shape[:2]) + x[..., 0],
    "repeated once": lambda x: x.repeat_interleave(x.shape[1] // 4, -1),
    "normalized": lambda x: torch.nn.functional.rms_norm(x, (5,), torch.ones(5)),
    "the largest": lambda x: x.topk(2, 1).values,
    "a softmax": lambda x: x.softmax(-1),
    "a diagonal": lambda x: x.diagonal().t(),
}


def _axes(tensor: torch.Tensor) -> list[int]:
    """The axes as they lie in memory, the outermost first; those of size 1 lie anywhere."""
    return sorted((a for a, size in enumerate(tensor.shape) if size > 1), key=lambda a: -tensor.stride(a))


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_made_of_a_tensor_in_another_order_lies_as_in_eager(name):
    """Where its own order decides, it does; where a tensor in order is made first, that one does."""
    wrapped = ORTModule(Calls(FOLLOWED[name]))
    for size in (3, 6):
        x = torch.rand(4, size, 5).transpose(0, 1)
        made, wanted = wrapped(x), FOLLOWED[name](x)
        assert _axes(made) == _axes(wanted)


@pytest.mark.parametrize("name", [*FOLLOWED, "other axes"])
@pytest.mark.parametrize("first", [torch.rand(1, 4, 5), torch.rand(4, 1, 5).transpose(0, 1), torch.rand(4, 3, 5)])
def test_calls_whose_inputs_lie_in_another_order_than_the_first(name, first):
    """A tensor of one row lies in any order; one graph serves those that come again in an order."""
    give = (FOLLOWED | {"other axes": lambda x: torch.diag_embed(x.permute(2, 0, 1))})[name]
    wrapped = ORTModule(Calls(give))
    wrapped(first)
    for x in [torch.rand(4, size, 5).transpose(0, 1) for size in (3, 6, 3)] + [first]:
        made, wanted = wrapped(x), give(x)
        torch.testing.assert_close(made, wanted)
        assert _axes(made) == _axes(wanted)
    assert captures(wrapped) == 2


def test_integers_in_another_order_need_no_graph_of_their_own():
    wrapped = ORTModule(Calls(lambda ids: torch.eye(9)[ids]))
    for ids in (torch.randint(9, (4, 3)), torch.randint(9, (3, 4)).t(), torch.arange(9).expand(2, 9)):
        assert torch.equal(wrapped(ids), torch.eye(9)[ids])
    assert captures(wrapped) == 1
