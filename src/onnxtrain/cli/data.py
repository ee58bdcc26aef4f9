"""Arrays of an .npz file by input name, split, shuffled and cut into batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from onnxtrain.errors import DataError, close_to, first_line
from onnxtrain.files import check_file, memory

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_ORDER, _SPLIT = 0, 1  # what random numbers are drawn for


@dataclasses.dataclass(frozen=True)
class DataSet:
    """An array for each input of a model, all with the same number of rows."""

    arrays: dict[str, np.ndarray]

    @classmethod
    def read(cls, path: Path | str, names: Sequence[str]) -> DataSet:
        """Read the arrays of an .npz file.

        Args:
            path: the file.
            names: of the model's inputs; the file has these arrays and no other.

        Raises:
            DataError: it cannot be read, an array is missing or too much, or they differ in length.
        """
        cure = "make it with numpy.savez, of arrays of numbers or of strings of type U"
        check_file(path, DataError, cure)
        try:
            _check_sizes(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except DataError:
            raise
        except Exception as error:  # zipfile and numpy raise many types for a file that is damaged
            raise DataError(f"{path} cannot be read as .npz: {first_line(error)}", cure=cure) from error
        for name in names:
            if name not in arrays:
                what = f"{path} has no array {name}{close_to(name, arrays)}"
                raise DataError(what, cure=f"the model reads {', '.join(names)}")
        if extra := [name for name in arrays if name not in names]:
            what = f"{path} has the array {extra[0]}, which is no input of the model"
            raise DataError(what, cure=f"leave only {', '.join(names)}")
        made = cls({name: arrays[name] for name in names})
        made._check(path)
        return made

    def _check(self, path: Path | str) -> None:
        lengths = {name: array.shape[0] if array.ndim else None for name, array in self.arrays.items()}
        if scalars := [name for name, length in lengths.items() if length is None]:
            raise DataError(f"{path}: {scalars[0]} is a scalar", cure="give an array with a row for each sample")
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"{path}: the arrays have unequal numbers of rows: {shown}", cure="give each the same")
        if not len(self):
            raise DataError(f"{path} has no rows", cure="give some data")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def take(self, rows: np.ndarray) -> DataSet:
        """Some of the rows."""
        return DataSet({name: array[rows] for name, array in self.arrays.items()})

    def split(self, share: float, seed: int) -> tuple[DataSet, DataSet]:
        """The rows to train on and a share that is held out, chosen by the seed.

        Raises:
            DataError: one of both would have no rows.
        """
        count = round(len(self) * share)
        if not 0 < count < len(self):
            what = f"a share of {share} of {len(self)} rows leaves none to train on or to hold out"
            raise DataError(what, cure="choose another --valid-share")
        order = _random(seed, 0, _SPLIT).permutation(len(self))
        return self.take(np.sort(order[count:])), self.take(np.sort(order[:count]))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch: of seed and epoch alone."""
        return _random(seed, epoch, _ORDER).permutation(len(self))

    def steps(self, size: int, whole: bool) -> int:
        """How many batches there are.

        Raises:
            DataError: the rows do not fill the only batch that the model takes.
        """
        if whole and len(self) < size:
            raise DataError(f"{len(self)} rows fill no batch of {size}", cure=f"the model takes {size} rows at a time")
        return len(self) // size if whole else -(-len(self) // size)

    def batches(
        self, size: int, whole: bool, order: np.ndarray | None = None, start: int = 0
    ) -> Iterator[list[np.ndarray]]:
        """Arrays for each batch.

        Args:
            size: rows of a batch; the last one may have fewer.
            whole: leave such a last one out.
            order: of the rows; None is as they are.
            start: number of batches to pass over.
        """
        rows = np.arange(len(self)) if order is None else order
        for index in range(start, self.steps(size, whole)):
            yield [array[rows[index * size : (index + 1) * size]] for array in self.arrays.values()]

    def digest(self) -> str:
        """A SHA-256 of names, types, shapes and content."""
        digest = hashlib.sha256()
        for name, array in self.arrays.items():
            digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _check_sizes(path: Path | str) -> None:
    """Refuse arrays that declare more than the file has, or than the machine has memory, before any is made."""
    total = 0
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                read = _HEADERS[np.lib.format.read_magic(file)]
                shape, _, dtype = read(file)
            size = math.prod(shape) * dtype.itemsize
            total += size
            if not dtype.hasobject and (size < 0 or size > member.file_size):
                what = f"{path}: {member.filename} declares {size:,} bytes and has {member.file_size:,}"
                raise DataError(what, cure="write the file again, whole")
    if total > memory():
        what = f"{path} declares {total:,} bytes, more than this machine has memory"
        raise DataError(what, cure="train on a part of it")


def _random(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, epoch, purpose])
