"""rankbench/training/products.h: products of matrices of any sizes and strides against torch's, with each of the
registers that a processor may have."""

import ctypes
import platform
import shutil
from pathlib import Path

import pytest
import torch

from rankbench.training import fused_step, library

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the fused step needs g++")

REGISTERS = {
    64: (),
    32: ("-mno-avx512f",),
    16: ("-mno-avx512f", "-mno-avx2", "-mno-avx"),
}  # bytes: the compiler's flags


class _Matrix(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_void_p), ("row", ctypes.c_int64), ("column", ctypes.c_int64)]


def described(matrix):
    return ctypes.byref(_Matrix(matrix.data_ptr(), *matrix.stride()))


@pytest.fixture(params=REGISTERS)
def product(request, monkeypatch, tmp_path):
    """A function (a, b, c, adds) -> None for numbers of a type, compiled for registers of so many bytes."""
    if request.param < 64 and platform.machine() != "x86_64":
        pytest.skip("flags of x86-64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, *REGISTERS[request.param]))
    source = tmp_path / "product.cpp"
    header = Path(fused_step.__file__).with_name("products.h")
    source.write_text(
        f'using real = REAL;\n#include "{header}"\n'
        'extern "C" void product(long M, long N, long K, const Matrix* a, const Matrix* b, real* c, long adds)'
        " { multiply(M, N, K, *a, *b, c, N, adds); }\n"
    )
    libraries = {}

    def multiply(a, b, c, adds):
        name = {torch.float32: "float", torch.float64: "double"}[a.dtype]
        if name not in libraries:
            libraries[name] = library.library(library.Source.read(source), {"REAL": name})
        sizes = map(ctypes.c_long, (len(a), b.shape[1], len(b)))
        libraries[name].product(*sizes, described(a), described(b), ctypes.c_void_p(c.data_ptr()), ctypes.c_long(adds))

    return multiply


SIZES = [(1, 1, 1), (8, 48, 16), (7, 49, 5), (13, 31, 257), (96, 10, 48), (5, 100, 300), (17, 16, 512), (3, 65, 2)]
# of the largest entry, with at most 512 terms: a few roundings
TOLERANCES = {torch.float32: 2e-6, torch.float64: 4e-15}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products_are_torchs(product, dtype):
    generator = torch.Generator().manual_seed(0)
    for M, N, K in SIZES:
        for is_transposed in range(4):
            a, b, c = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((M, K), (K, N), (M, N)))
            a = a.T.contiguous().T if is_transposed % 2 else a
            b = b.T.contiguous().T if is_transposed // 2 else b
            before = c.clone()
            for adds in (False, True, True):
                expected = a @ b + (c if adds else 0)
                product(a, b, c, adds)
                torch.testing.assert_close(c, expected, rtol=0, atol=TOLERANCES[dtype] * float(expected.abs().max()))
            assert not torch.equal(c, before)


def test_no_number_beside_a_matrix_is_read_into_it_or_written(product):
    numbers = torch.full((20, 60), torch.nan)
    a, b, c = torch.ones(9, 5), torch.ones(5, 50), torch.full((11, 50), 7.0)
    numbers[4:9, 3:53] = b
    product(a, numbers[4:9, 3:53], c, False)
    assert c[:9].eq(5).all() and c[9:].eq(7).all()


def test_nan_and_infinity_stay_in_their_rows_and_columns(product):
    a, b, c = torch.ones(9, 5), torch.ones(5, 50), torch.full((9, 50), torch.nan)
    a[2, 3], b[1, 40] = torch.nan, torch.inf
    product(a, b, c, False)
    assert c[2].isnan().all() and c[[0, 8], 40].isinf().all()
    assert c[0, :40].eq(5).all() and c[8, 41:].eq(5).all()
