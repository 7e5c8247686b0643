"""Join the C++ kernels of a piece to one source with bindings of our own.

Reading the headers is five sixths of what a C++ compiler does for a kernel, so a piece's kernels share one reading. The
bindings take arguments without packing them into a tuple, and an address in place of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piecework.seam.vocabulary import Refusal


@dataclass(frozen=True)
class CppKernel:
    """A kernel as Inductor writes it: a function `kernel` of these C++ types, in a source of its own."""

    types: tuple[str, ...]
    source: str


_INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
_LINKAGE = re.compile(r'extern\s+"C"\s+(?!\{)')
_POINTER = re.compile(r"(?:const )?[\w:]+\*")
_INTEGERS = frozenset(("int64_t", "int32_t", "uint64_t", "uint32_t", "uintptr_t", "bool", "long", "int"))
_FLOATS = frozenset(("float", "double"))

_BINDING_HEAD = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <stdexcept>
"""
_BINDING = """\
static void* (*piecework_address)(PyObject*);

template <typename T> static inline T piecework_pointer(PyObject* value) {
    void* address = PyLong_CheckExact(value) ? PyLong_AsVoidPtr(value) : piecework_address(value);
    if (address == nullptr && PyErr_Occurred()) throw std::runtime_error("a tensor was expected");
    return static_cast<T>(address);
}
template <typename T> static inline T piecework_integer(PyObject* value) {
    long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw std::runtime_error("a whole number was expected");
    return static_cast<T>(number);
}
template <typename T> static inline T piecework_float(PyObject* value) {
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) throw std::runtime_error("a number was expected");
    return static_cast<T>(number);
}
"""
_FUNCTION = """\
static PyObject* piecework_call_{name}(PyObject*, PyObject* const* values, Py_ssize_t count) {{
    try {{
        if (count != {count}) throw std::runtime_error("{name} takes {count} arguments");
        {name}::kernel({arguments});
        Py_RETURN_NONE;
    }} catch (std::exception const& error) {{
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "{name} failed");
    }}
    return nullptr;
}}
"""
_MODULE = """\
static PyMethodDef piecework_methods[] = {{
{methods}
    {{nullptr, nullptr, 0, nullptr}}}};
static struct PyModuleDef piecework_module = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, piecework_methods}};

PyMODINIT_FUNC PyInit_kernel(void) {{
    const char* text = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    unsigned long long address = text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
    if (address == 0) {{
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR must be set");
        return nullptr;
    }}
    piecework_address = reinterpret_cast<decltype(piecework_address)>(static_cast<uintptr_t>(address));
    return PyModule_Create(&piecework_module);
}}
"""


def join_kernels(kernels: Mapping[str, CppKernel]) -> str:
    """Return one C++ source in which each kernel has a namespace of its name, and a binding under that name."""
    includes = dict.fromkeys(line for kernel in kernels.values() for line in _INCLUDE.findall(kernel.source))
    parts = [*includes, _BINDING_HEAD]
    for name, kernel in kernels.items():
        body = _LINKAGE.sub("", _INCLUDE.sub("", kernel.source)).strip()
        parts.append(f"namespace {name} {{\n{body}\n}}  // namespace {name}\n")
    parts.append(_BINDING)
    for name, kernel in kernels.items():
        arguments = ", ".join(_take(kind, index) for index, kind in enumerate(kernel.types))
        parts.append(_FUNCTION.format(name=name, count=len(kernel.types), arguments=arguments))
    methods = (
        f'    {{"{name}", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(piecework_call_{name})), '
        f'METH_FASTCALL, ""}},'
        for name in kernels
    )
    parts.append(_MODULE.format(methods="\n".join(methods)))
    return "\n".join(parts)


def _take(kind: str, index: int) -> str:
    plain = kind.removeprefix("const ").strip()
    if _POINTER.fullmatch(kind):
        return f"piecework_pointer<{kind}>(values[{index}])"
    if plain in _INTEGERS:
        return f"piecework_integer<{plain}>(values[{index}])"
    if plain in _FLOATS:
        return f"piecework_float<{plain}>(values[{index}])"
    raise Refusal(f"a C++ kernel takes a `{kind}`")


def argument_types(values: Sequence[str]) -> tuple[str, ...]:
    """Return argument types as Inductor lists them, with single spaces."""
    return tuple(" ".join(str(value).split()) for value in values)
