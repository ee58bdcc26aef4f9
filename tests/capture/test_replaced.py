"""What is replaced is as it was afterwards: inherited, absent, or what stood there before a descriptor gave it."""

import contextlib

import pytest

from onnxtrain.capture.replaced import ABSENT, replaced


class _Base:
    inherited = 1


class _Owner(_Base):
    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def of_nobody() -> int:
        return 1


def test_attributes_come_back_as_the_class_has_them() -> None:
    before = dict(vars(_Owner))
    with replaced((_Owner, "inherited", 2), (_Owner, "of_class", 3), (_Owner, "of_nobody", 4), (_Owner, "added", 5)):
        assert (_Owner.inherited, _Owner.of_class, _Owner.of_nobody, _Owner.added) == (2, 3, 4, 5)  # type: ignore[attr-defined]
    assert dict(vars(_Owner)) == before
    assert (_Owner.inherited, _Owner.of_class(), _Owner().of_nobody()) == (1, "_Owner", 1)


def test_what_an_object_has_from_its_class_is_its_class_s_again() -> None:
    one = _Owner()
    with replaced((one, "of_nobody", lambda: 2)), replaced((one, "of_nobody", lambda: 3)):
        assert one.of_nobody() == 3
    assert not vars(one) and one.of_nobody() == 1


def test_entries_of_dictionaries_are_replaced_and_hidden() -> None:
    table = {"there": 1, "hidden": 2}
    with replaced((table, "there", 3), (table, "hidden", ABSENT), (table, "new", 4), (table, "none", ABSENT)):
        assert table == {"there": 3, "new": 4}
    assert table == {"there": 1, "hidden": 2}


def test_errors_pass_and_all_comes_back() -> None:
    table = {"there": 1}
    with pytest.raises(ValueError, match="within"), contextlib.ExitStack() as stack:
        stack.enter_context(replaced((table, "there", 2)))
        raise ValueError("within")
    assert table == {"there": 1}
