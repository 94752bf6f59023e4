"""Room for samples is made before the first of them comes, or refused with a number."""

from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.buffer.layout import affordable
from holdfast.rng import generator

X, Y, LOGITS = torch.ones(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64), torch.ones(2, 10)


def make(capacity=5, storage="device"):
    return hf.Reservoir(capacity, generator=generator(0, "buffer"), storage=storage)


@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("capacity", [10**13, 2**62, 2**63, 10**30])
@pytest.mark.parametrize("method", ["reserve", "add"])
def test_memory_that_cannot_be_had_is_refused_with_its_size(storage, capacity, method):
    buffer = make(capacity, storage)
    before = buffer.generator.get_state()
    wanted = (capacity + 1) * (4 * 3 * 32 * 32 + 8 + 4 * 10)
    with pytest.raises(hf.StorageError, match=f"needs {wanted:,} bytes in the memory of cpu.*smaller buffer"):
        getattr(buffer, method)(X, Y, LOGITS)
    assert torch.equal(buffer.generator.get_state(), before)
    assert (buffer.stored, int(buffer.seen)) == (0, 0)


@pytest.mark.parametrize("capacity", [10**15, 2**62, 10**30])
def test_a_folder_for_too_many_samples_is_refused(tmp_path, capacity):
    with pytest.raises(hf.StorageError, match=f"needs {16 * capacity:,} bytes in the host's memory"):
        make(capacity, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize("storage", ["device", "host", "folder"])
def test_reserving_changes_neither_draws_nor_state(tmp_path, storage):
    one, twin = (make(storage=tmp_path / name if storage == "folder" else storage) for name in ("one", "twin"))
    one.reserve(X, Y, LOGITS)
    assert one.stored == 0
    assert one.state_dict().keys() == twin.state_dict().keys()
    for key, value in twin.state_dict().items():
        assert key == "folder" or repr(one.state_dict()[key]) == repr(value)
    for step in range(9):
        for buffer in (one, twin):
            if step % 3 == 0:
                one.reserve(X, Y, LOGITS)
            buffer.add(X * step, Y + step, LOGITS)
        assert torch.equal(one.sample(3).y, twin.sample(3).y)
    assert torch.equal(one.contents().x, twin.contents().x)


@pytest.mark.parametrize("storage", ["device", "host", "folder"])
def test_what_was_reserved_for_a_step_that_failed_binds_nobody(tmp_path, storage):
    buffer = make(storage=tmp_path / "buffer" if storage == "folder" else storage)
    buffer.reserve(X, Y, LOGITS)
    buffer.reserve(X[:, 0].double(), {"label": Y})
    buffer.add(X[:, 0].double(), {"label": Y})
    assert torch.equal(buffer.contents().x, X[:, 0].double())
    with pytest.raises(hf.UsageError, match=r"x is \(3, 32, 32\) float32, stored is \(32, 32\) float64"):
        buffer.reserve(X, {"label": Y})
    buffer.commit()
    buffer.close()
    again = make(storage=tmp_path / "buffer") if storage == "folder" else buffer
    assert torch.equal(again.contents().y["label"], Y)


def test_addresses_stay_once_memory_is_reserved():
    buffer = make()
    buffer.reserve(X, Y, LOGITS)
    before = [column.data_ptr() for column in buffer._storage.columns]
    for _ in range(5):
        buffer.add(X, Y, LOGITS)
    other = make()
    other.add(X, Y, LOGITS)
    buffer.load_state_dict(other.state_dict())
    buffer.load_state_dict(make().state_dict())
    buffer.add(X, Y, LOGITS)
    assert [column.data_ptr() for column in buffer._storage.columns] == before


def test_a_full_disk_is_noticed_when_room_is_reserved(tmp_path, monkeypatch):
    import os

    def full(*_):
        raise OSError(28, "No space left on device")

    buffer = make(storage=tmp_path / "buffer")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(hf.StorageError, match="No space left on device"):
        buffer.reserve(X, Y, LOGITS)
    assert buffer.stored == 0


def test_a_number_without_rows_is_refused():
    for x, y in ((torch.tensor(1.0), Y), (X, torch.tensor(3))):
        with pytest.raises(hf.UsageError, match="is a single number; it needs one row per sample"):
            make().add(x, y)
    assert Path.cwd().exists()


@pytest.mark.parametrize(
    "error", [ValueError("argument 2 is shorter"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    with pytest.raises(type(error), match=str(error)[:10]), affordable(8, "the memory of cpu"):
        raise error


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")]
)
def test_a_lack_of_memory_is_told_with_its_size(error):
    with (
        pytest.raises(hf.StorageError, match="needs 8 bytes in the memory of cuda"),
        affordable(8, "the memory of cuda"),
    ):
        raise error


def test_more_than_the_machine_has_is_refused_before_it_is_used(monkeypatch):
    buffer = make()
    needed = (buffer.capacity + 1) * (X[0].nbytes + Y[0].nbytes)
    monkeypatch.setattr("holdfast.buffer.memory.host_memory", lambda: needed - 1)
    with pytest.raises(hf.StorageError, match=f"needs {needed:,} bytes in the memory of cpu, which has {needed - 1:,}"):
        buffer.add(X, Y)
    assert buffer.stored == 0
    monkeypatch.setattr("holdfast.buffer.memory.host_memory", lambda: needed)
    buffer.add(X, Y)
    with pytest.raises(hf.StorageError, match="which has"):
        hf.Reservoir(10**13).add(X, Y)


RARE = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("dtype", [*RARE, torch.int16, torch.bool, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("width", [3, 8])
def test_samples_of_any_type(storage, dtype, width):
    x = torch.arange(6 * width).reshape(6, width).to(torch.float32).to(dtype)
    buffer = make(storage=storage)
    buffer.add(x[:4], torch.arange(4))
    buffer.add(x[4:], torch.arange(4, 6))
    for drawn in (buffer.contents(), buffer.sample(5)):
        assert drawn.x.dtype == dtype
        for found, label in zip(drawn.x, drawn.y.tolist(), strict=True):
            assert torch.equal(found.view(torch.uint8), x[label].view(torch.uint8))
