"""The host store: layout, adoption, and giving memory back."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from test_window import CPU, Ref, parameter
from torch import nn

from poros_core.host_memory import HostBuffer
from poros_core.host_store import ALIGNMENT, HostStore, layout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_keeps_its_bytes_dtype_and_shape(dtype: torch.dtype) -> None:
    source = torch.arange(35, dtype=torch.float32).view(5, 7).to(dtype)
    param = nn.Parameter(source.clone(), requires_grad=False)
    HostStore(CPU).adopt([Ref(param)])
    assert torch.equal(param.data, source)
    assert param.dtype == dtype
    assert param.shape == (5, 7)


def test_offsets_are_aligned_and_do_not_overlap() -> None:
    entries, size = layout([Ref(parameter(i, 1 + 13 * i)) for i in range(6)])
    end = 0
    for entry in entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= size


def test_the_memory_a_tensor_had_is_freed() -> None:
    array = np.ones(64, dtype=np.float32)
    owner = weakref.ref(array)
    param = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    del array
    store = HostStore(CPU)
    assert owner() is not None
    store.adopt([Ref(param)])
    gc.collect()
    assert owner() is None


def test_a_unit_is_adopted_once() -> None:
    store = HostStore(CPU)
    refs = [Ref(parameter(0, 9)), Ref(parameter(1, 4))]
    image = store.adopt(refs)
    assert store.adopt(refs) is image


def test_a_unit_whose_tensor_was_cast_since_is_laid_out_anew() -> None:
    store = HostStore(CPU)
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16), requires_grad=False)
    first = store.adopt([Ref(param)])
    param.data = param.data.to(torch.float32)
    second = store.adopt([Ref(param)])
    assert second is not first
    assert second is not None
    assert second.entries[0].dtype == torch.float32
    assert store.nbytes == second.nbytes, "the first image is dropped"


def test_a_tensor_that_trains_now_leaves_the_image() -> None:
    store = HostStore(CPU)
    refs = [Ref(parameter(0, 9)), Ref(parameter(1, 4))]
    store.adopt(refs)
    narrowed = store.adopt(refs[:1])
    assert narrowed is not None
    assert [entry.ref.key for entry in narrowed.entries] == [refs[0].key]


def test_restore_gives_every_tensor_memory_of_its_own() -> None:
    store = HostStore(CPU)
    param = parameter(3, 4, 4)
    expected = param.detach().clone()
    image = store.adopt([Ref(param)])
    assert image is not None
    store.restore(None)
    assert torch.equal(param, expected)
    image.buffer.bytes.fill_(0xFF)
    assert torch.equal(param, expected)


def test_a_home_store_keeps_its_tensors_unless_told_where_to() -> None:
    store = HostStore(CPU, home=True)
    param = parameter(3, 4, 4)
    image = store.adopt([Ref(param)])
    assert image is not None
    param.data = torch.full((4, 4), float("nan"))
    store.restore(None)
    assert param.data_ptr() == image.buffer.bytes.data_ptr()
    store.restore(CPU)
    assert param.data_ptr() != image.buffer.bytes.data_ptr()


def test_no_tensors_make_no_image() -> None:
    assert HostStore(CPU).adopt([]) is None


def test_page_locked_memory_is_given_up_when_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Runtime:
        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            return 0

        def cudaHostUnregister(self, pointer: int) -> None:
            done.append("unregistered")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"waited {device}"))
    buffer = HostBuffer(4096, device=torch.device("cuda", 0))
    assert not done
    del buffer
    assert done == ["waited cuda:0", "unregistered"]
