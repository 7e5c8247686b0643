"""Joining a piece's C++ kernels to one source."""

from __future__ import annotations

import pytest

from piecework.seam.cpp_source import CppKernel, argument_types, join_kernels
from piecework.seam.vocabulary import Refusal

ADD = CppKernel(
    ("const float*", "float*", "const int64_t"),
    "\n#include <torch/csrc/inductor/cpp_prefix.h>\n"
    'extern "C"  void  kernel(const float* in, float* out, const int64_t n)\n{ out[0] = in[0]; }\n',
)
SCALE = CppKernel(
    ("float*", "const double"),
    "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <cmath>\ninline float twice(float x) { return 2 * x; }\n"
    'extern "C" void kernel(float* out, const double by) { out[0] = twice(out[0]) * by; }\n',
)


def test_headers_are_read_once_and_kernels_stand_apart() -> None:
    text = join_kernels({"add": ADD, "scale": SCALE})
    assert text.count("cpp_prefix.h") == 1
    assert text.index("#include <cmath>") < text.index("namespace add {")
    assert 'extern "C"  void' not in text
    assert "namespace scale {\ninline float twice(float x)" in text
    assert text.count("#include <Python.h>") == 1


def test_each_kernel_has_a_binding_of_its_types() -> None:
    text = join_kernels({"add": ADD, "scale": SCALE})
    assert (
        "add::kernel(piecework_pointer<const float*>(values[0]), piecework_pointer<float*>(values[1]), "
        "piecework_integer<int64_t>(values[2]));"
    ) in text
    assert "scale::kernel(piecework_pointer<float*>(values[0]), piecework_float<double>(values[1]));" in text
    assert "if (count != 3) throw" in text
    assert '{"add", reinterpret_cast<PyCFunction>' in text


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(Refusal, match="a C\\+\\+ kernel takes a `at::Tensor`"):
        join_kernels({"odd": CppKernel(("at::Tensor",), "void kernel(at::Tensor x) {}")})


def test_types_are_written_with_single_spaces() -> None:
    assert argument_types([" const   float* ", "int64_t"]) == ("const float*", "int64_t")
